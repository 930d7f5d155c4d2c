"""What a replica does under a load: the formula, the scheduler in virtual time, and how many replicas that makes."""

from __future__ import annotations

import pytest

from deploy.capacity.load import ExpectedLoad, Wanted, serve_load
from deploy.capacity.rehearsal import rehearse, saturate
from deploy.capacity.steady import SteadyReplica
from deploy.capacity.step_time import MEASURED
from engine.errors import ConfigError
from tests.deploy.capacity.shapes import held

WITHIN = 0.1  # of what the scheduler does


@pytest.mark.parametrize(
    ("model", "ranks", "load"),
    [
        ("llama-8b", 1, ExpectedLoad(1024, 256)),
        ("llama-8b", 1, ExpectedLoad(200, 200, rps=300)),
        ("llama-8b", 1, ExpectedLoad(1024, 256, tpot=0.03, headroom=0.3)),
        ("llama-70b", 4, ExpectedLoad(1024, 256, rps=20, tpot=0.05)),
    ],
)
def test_the_peak_is_within_10_percent_of_the_schedulers_run(model, ranks, load):
    found = held(model, "H100", tensor_parallel_size=ranks)
    planned = serve_load(found, load).peak
    ran = rehearse(found, load, planned, requests=400)
    assert planned.ttft == pytest.approx(ran.ttft, rel=WITHIN)
    assert planned.tpot == pytest.approx(ran.tpot, rel=WITHIN)
    # By Little's law, as the requests that came were not exactly as many.
    running = ran.rps * (ran.ttft + (load.output_len - 1) * ran.tpot)
    assert planned.sequences / planned.rps == pytest.approx(running / ran.rps, rel=WITHIN)


@pytest.mark.parametrize(
    ("load", "sequences"),
    [(ExpectedLoad(1024, 256), 256), (ExpectedLoad(200, 100), 64), (ExpectedLoad(4000, 100), 40)],
)
def test_the_most_that_a_replica_does_is_within_10_percent_of_the_schedulers_run(load, sequences):
    found = held("llama-8b", "H100", max_num_seqs=sequences)
    planned = SteadyReplica(found, load.input_len, load.output_len, MEASURED).full(sequences)
    ran = saturate(found, load, planned, requests=3 * sequences)
    assert planned.rps == pytest.approx(ran.rps, rel=WITHIN)
    assert planned.tpot == pytest.approx(ran.tpot, rel=WITHIN)


def test_a_rehearsal_is_the_same_again_and_another_with_another_seed():
    found, load = held("llama-8b", "H100"), ExpectedLoad(200, 20)
    peak = serve_load(found, load).peak
    first, again, other = (rehearse(found, load, peak, 50, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.ttft < first.ttft_p95


def test_a_request_alone_waits_for_one_step_ahead_and_its_own():
    found = held("llama-8b", "H100")
    steps = SteadyReplica(found, 1024, 256, MEASURED)
    alone = steps.at(1e-3)
    decode = steps._steps.decode(0, 0).expected(MEASURED)
    prompt = steps._steps.prefill(1024)[0].expected(MEASURED)
    assert alone.ttft == pytest.approx(1.5 * decode + prompt, rel=0.05)
    assert alone.sequences == pytest.approx(alone.rps * (alone.ttft + 255 * alone.tpot))


def test_more_requests_take_longer():
    replica = SteadyReplica(held("llama-8b", "H100"), 1024, 256, MEASURED)
    flows = [replica.at(rps) for rps in (1, 5, 10, 20)]
    for name in ("sequences", "ttft", "tpot"):
        values = [getattr(flow, name) for flow in flows]
        assert values == sorted(values), name


def test_prompts_of_several_chunks_wait_for_all_of_them():
    small, large = (
        SteadyReplica(held(max_num_batched_tokens=size), 8000, 10, MEASURED).at(0.01).ttft for size in (1024, 8192)
    )
    assert small > large


def test_many_short_answers_begin_in_a_step():
    found = held("llama-8b", "H100")
    done = SteadyReplica(found, 50, 2, MEASURED).full(256)
    ran = saturate(found, ExpectedLoad(50, 2), done, requests=1000)
    assert done.rps == pytest.approx(ran.rps, rel=0.15)


# Replicas.


def test_a_rate_takes_replicas_with_headroom_and_one_to_spare():
    found = held()
    alone = serve_load(found, ExpectedLoad(1024, 256))
    assert alone.replicas is None
    assert alone.used == pytest.approx(0.8)
    nearly_two = 2 * alone.most.rps * 0.999
    tight = serve_load(found, ExpectedLoad(1024, 256, rps=nearly_two, headroom=0.0, spare=0))
    assert tight.replicas == 2
    assert tight.used == pytest.approx(0.999)
    usual = serve_load(found, ExpectedLoad(1024, 256, rps=nearly_two))
    assert usual.replicas == 3 + 1
    assert usual.used == pytest.approx(2 * 0.999 / 3), "when the spare one is lost"
    assert usual.peak.tpot < tight.peak.tpot
    assert serve_load(found, ExpectedLoad(1024, 256, rps=nearly_two, spare=2)).replicas == 5


def test_a_replica_is_as_full_as_the_settings_allow():
    done = serve_load(held(), ExpectedLoad(1024, 256))
    assert (done.limit, done.most.sequences) == ("--max-num-seqs", 256)


def test_targets_lower_the_rate_until_they_are_met():
    found = held()
    free = serve_load(found, ExpectedLoad(1024, 256))
    bound = serve_load(found, ExpectedLoad(1024, 256, tpot=free.most.tpot / 2))
    assert bound.limit == "--tpot"
    assert bound.most.rps < free.most.rps
    assert bound.most.tpot == pytest.approx(free.most.tpot / 2, rel=0.02)
    soon = serve_load(found, ExpectedLoad(1024, 256, ttft=bound.most.ttft * 0.8))
    assert soon.limit == "--ttft"
    assert soon.most.ttft <= bound.most.ttft * 0.8
    assert soon.most.rps < bound.most.rps


def test_a_target_that_is_met_anyway_changes_nothing():
    found = held()
    assert serve_load(found, ExpectedLoad(1024, 256, ttft=100, tpot=100)) == serve_load(
        found, ExpectedLoad(1024, 256)
    )


def test_a_small_cache_bounds_the_sequences():
    done = serve_load(held(block_size=256, num_kv_blocks=1001, max_model_len=4096), ExpectedLoad(2000, 500))
    assert (done.most.sequences, done.limit) == (100, "KV cache")


@pytest.mark.parametrize(
    ("asked", "context", "lengths"),
    [
        ((None, None), 131072, (1024, 256)),
        ((None, None), 1024, (768, 256)),
        ((None, None), 512, (384, 128)),
        ((1000, None), 1024, (1000, 24)),
        ((None, 1000), 1024, (24, 1000)),
        ((2000, None), 1024, (2000, 1)),
        ((7, 9), 1024, (7, 9)),
    ],
)
def test_lengths_of_which_nothing_is_said_fit_the_context(asked, context, lengths):
    load = Wanted(*asked).within(context)
    assert (load.input_len, load.output_len) == lengths


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"rps": 0}, "rps"),
        ({"ttft": float("nan")}, "ttft"),
        ({"tpot": -1}, "tpot"),
        ({"share": 1.5}, "roofline_share"),
        ({"headroom": 1.0}, "headroom"),
        ({"headroom": -0.1}, "headroom"),
        ({"headroom": float("nan")}, "headroom"),
        ({"spare": -1}, "spare_replicas"),
        ({"output_len": 0}, "output_len"),
    ],
)
def test_loads_that_are_none_are_refused_by_flag(values, flag):
    with pytest.raises(ConfigError) as error:
        ExpectedLoad(**{"input_len": 1, "output_len": 1, **values})
    assert error.value.flag == flag
