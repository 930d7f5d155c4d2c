import logging
from dataclasses import replace

import numpy as np
import pytest

from cluster.accounts.flight_recorder import Wait
from engine import step as prompt_results
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import (
    ConfigError,
    EngineDeadError,
    IntegrityError,
    InvalidRequestError,
    PromptTooLongError,
    StepMemoryError,
)
from engine.grammar.base import CompiledGrammar
from engine.inputs.prepare import SamplingBuilder
from engine.kv.block_manager import BlockManager, token_bytes
from engine.report import StepOutputs
from engine.request import FinishReason, GrammarState, Request
from engine.sampling.parameter_table import SamplingTable
from engine.sampling_params import SamplingParams, StructuredOutput
from engine.scheduler.slots import Slots, SlotTables
from engine.scheduler.update import Updater
from engine.worker.executor import Executor
from tests.engine.engine_driver import EOS, VOCAB, Driver, expected, request
from tests.fake_executor import Done, FakeExecutor


class Broken(Executor):
    """Answers with whatever it was given."""

    def __init__(self, answer):
        self.answer, self.closed = answer, 0

    def launch(self, inputs, sampling):
        if isinstance(self.answer, Exception):
            raise self.answer
        return Done(StepOutputs(self.answer))

    def close(self):
        self.closed += 1


# ---- the life of a request ---------------------------------------------------------------------------------


def test_a_request_gives_the_same_tokens_alone_and_in_company():
    requests = [
        request(f"r{i}", 1 + 5 * i % 23, seed=i, n=1 + i % 3, temperature=float(i % 2), max_tokens=1 + i * 3)
        for i in range(9)
    ]
    driver = Driver()
    driver.run(*requests)
    for one in requests:
        for choice in range(one.params.n):
            assert driver.tokens[one.request_id, choice] == expected(one, choice)


@pytest.mark.parametrize("overlaps", [False, True])
def test_whoever_a_step_is_the_first_for_is_told_before_it_runs_and_once(overlaps):
    """Who waits is not told, nor is a second chunk, nor one that is computed again after it lost its blocks."""
    driver = Driver(num_blocks=24, max_num_seqs=3, async_scheduling=overlaps)
    told: list[tuple[int, str]] = []
    launched: list[int] = []
    launch = driver.executor.launch

    def launch_and_count(inputs, sampling):
        launched.append(inputs.num_tokens)
        return launch(inputs, sampling)

    driver.executor.launch = launch_and_count
    driver.core.call_on_begin(lambda begun: told.extend((len(launched), one.request_id) for one in begun))
    for name, length in {"two chunks": 20, "pair": 6, "third": 6, "waits": 6}.items():
        driver.core.add(request(name, length, n=2 if name == "pair" else 1, max_tokens=24, ignore_eos=True))
    driver.step()
    assert told[0] == (0, "two chunks"), "the executor had the step before it was told"
    assert "waits" not in {name for _, name in told}
    driver.drain()
    assert sorted(name for _, name in told) == ["pair", "third", "two chunks", "waits"]
    assert driver.core.stats().preemptions > 0, "the case is too easy"


def test_penalised_requests_give_the_same_tokens_alone_and_in_a_cramped_crowd():
    requests = [
        request(f"r{i}", 3 + i, seed=i, n=1 + i % 2, temperature=1.0, presence_penalty=0.5 * (i % 3), max_tokens=12)
        for i in range(6)
    ]
    crowd = Driver(num_blocks=12, max_num_seqs=5, max_num_batched_tokens=7)
    crowd.run(*requests)
    assert crowd.core.stats().preemptions > 0
    for one in requests:
        alone = Driver()
        alone.run(one)
        assert {key: crowd.tokens[key] for key in alone.tokens} == alone.tokens


def test_an_idle_engine_does_not_call_its_executor():
    driver = Driver(executor=Broken(RuntimeError("must not be called")))
    report = driver.step()
    assert (report.sequences, report.token_ids, report.finished, report.num_tokens) == ([], [], [], 0)
    assert not driver.core.has_unfinished


def end_token(one):
    """Return the position and value of the first token of its greedy answer that did not occur before."""
    tokens = expected(one)
    return next((i, token) for i, token in enumerate(tokens) if i >= 2 and token not in tokens[:i])


def test_stop_ids_end_a_sequence_and_are_named():
    free = request("free", 6, max_tokens=20, ignore_eos=True)
    position, token = end_token(free)
    driver = Driver()
    driver.run(replace(free, params=replace(free.params, stop_token_ids=(token,))))
    assert driver.tokens["free", 0] == expected(free)[: position + 1]
    assert driver.reason("free") is FinishReason.STOP
    assert driver.finished["free", 0].sequence.stop_token == token


def test_a_stop_id_of_one_request_ends_no_other():
    free = request("free", 6, max_tokens=20, ignore_eos=True)
    _, token = end_token(free)
    driver = Driver()
    driver.run(free, request("other", 3, max_tokens=20, stop_token_ids=(token,)))
    assert driver.tokens["free", 0] == expected(free)
    assert driver.reason("free") is FinishReason.LENGTH


def prompt_that_ends(within):
    """Return a greedy request whose answer meets the end of sequence after two to `within` tokens."""
    for first in range(1, VOCAB):
        one = request("ends", (first, 7), max_tokens=64 - 2)
        if EOS in expected(one)[2:within]:
            return one
    raise AssertionError("no such prompt")


def test_the_end_of_sequence_ends_unless_it_is_ignored_or_too_early():
    one = prompt_that_ends(within=20)
    length = len(expected(one))
    driver = Driver()
    driver.run(
        one,
        replace(one, request_id="ignores", params=replace(one.params, ignore_eos=True)),
        replace(one, request_id="later", params=replace(one.params, min_tokens=length + 3)),
    )
    assert driver.reason("ends") is FinishReason.STOP
    assert driver.finished["ends", 0].sequence.stop_token == EOS
    assert len(driver.tokens["ends", 0]) == length
    assert len(driver.tokens["ignores", 0]) == 62
    assert driver.reason("ignores") is FinishReason.LENGTH
    assert len(driver.tokens["later", 0]) >= length + 3
    assert EOS not in driver.tokens["later", 0][: length + 3]


def test_an_open_max_tokens_runs_to_the_end_of_the_context_or_the_cache():
    for num_blocks, room in ((64, 64), (6, 20)):
        driver = Driver(num_blocks=num_blocks)
        driver.run(request("open", 9, max_tokens=None, ignore_eos=True))
        assert len(driver.tokens["open", 0]) == room - 9
        assert driver.reason("open") is FinishReason.LENGTH


def test_one_choice_can_end_early_while_its_siblings_go_on():
    driver = Driver()
    wanted = request("n", 6, n=3, temperature=1.0, max_tokens=12, ignore_eos=True)
    driver.core.add(wanted)
    assert not driver.core.finish_choice("n", 0), "it has siblings to fork"
    driver.step()
    driver.step()
    assert driver.core.finish_choice("n", 0)
    assert not driver.core.finish_choice("n", 0)
    assert not driver.core.finish_choice("n", 3)
    driver.drain()
    assert [driver.reason("n", i).value for i in range(3)] == ["abort", "length", "length"]
    assert [driver.tokens["n", i] for i in (1, 2)] == [expected(wanted, i) for i in (1, 2)]
    assert driver.tokens["n", 0] == expected(wanted, 0)[:2]


def test_an_id_is_free_again_after_its_request_ended():
    driver = Driver()
    driver.run(request("again", 3))
    driver.finished.clear()
    driver.tokens.clear()
    driver.run(request("again", 3))
    assert driver.tokens["again", 0] == expected(request("again", 3))


def test_logprobs_belong_to_the_token_and_are_as_many_as_asked_for():
    driver = Driver()
    driver.run(request("two", 3, logprobs=2), request("none", 3), request("chosen", 3, n=2, logprobs=0))
    for key, count in ((("two", 0), 2), (("chosen", 0), 0), (("chosen", 1), 0)):
        assert [entry.token_id for entry in driver.logprobs[key]] == driver.tokens[key]
        assert {len(entry.top) for entry in driver.logprobs[key]} == {count}
    assert ("none", 0) not in driver.logprobs


def test_events_tell_what_the_cache_holds():
    driver = Driver(num_blocks=16)
    known: set[bytes] = set()
    for i in range(12):
        driver.core.add(request(f"r{i}", (1 + i, *range(2, 20)), max_tokens=4))
        while driver.core.has_unfinished:
            events = driver.step().events
            known = (set() if events.cleared else known) - set(events.removed) | set(events.stored)
            assert known == set(driver.core.cached_blocks().stored)
    driver.core.reset_prefix_cache()
    events = driver.step().events
    assert events.cleared and driver.core.cached_blocks().stored == ()
    assert driver.core.cached_blocks().cleared


def test_counters_add_up():
    driver = Driver()
    driver.run(request("a", 5, n=2, max_tokens=3, ignore_eos=True), request("b", 7, max_tokens=1))
    stats = driver.core.stats()
    assert stats.prompt_tokens == 12
    assert stats.generated_tokens == 2 * 3 + 1
    assert stats.kv_usage == 0.0


# ---- bad input ---------------------------------------------------------------------------------------------

BAD = [
    (request("", 3), "request_id"),
    (request("live", 3), "request_id"),
    (request("x", ()), "prompt"),
    (request("x", (1, VOCAB)), "prompt"),
    (request("x", (1, -1)), "prompt"),
    (request("x", (1, 2.5)), "prompt"),
    (request("x", (1, "2")), "prompt"),
    (request("x", (1, 2**70)), "prompt"),
    (request("x", 3, stop_token_ids=(VOCAB,)), "stop_token_ids"),
    (request("x", 3, n=9), "n"),
    (request("x", 3, max_tokens=62), "max_tokens"),
    (request("x", 3, max_tokens=None, min_tokens=62), "min_tokens"),
    (request("x", 3, seed=2**63), "seed"),
    (Request("x", (1,), SamplingParams(), seed=True), "seed"),
    (Request("x", (1,), SamplingParams(), priority=1.5), "priority"),
    (Request("x", (1,), SamplingParams(), arrival_time=float("nan")), "arrival_time"),
    (Request("x", (1,), SamplingParams(), cache_salt="text"), "cache_salt"),
    (Request("x", (1,), SamplingParams(n=2), resume={}), "resume"),
    (Request("x", (1,), SamplingParams(n=2), resume={2: (1,)}), "resume"),
    (Request("x", (1,), SamplingParams(n=2), resume={"0": (1,)}), "resume"),
    (Request("x", (1,), SamplingParams(), resume={0: (VOCAB,)}), "resume"),
    (Request("x", (1,), SamplingParams(max_tokens=4), resume={0: (1, 2, 3, 4)}), "resume"),
]


@pytest.mark.parametrize(("bad", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_bad_input_is_refused_by_name_and_changes_nothing(bad, param):
    driver = Driver()
    bystander = request("live", 6, ignore_eos=True)
    driver.core.add(bystander)
    driver.step()
    before = driver.core.stats()
    with pytest.raises(InvalidRequestError) as refused:
        driver.core.add(bad)
    assert refused.value.param == param
    assert driver.core.stats() == before
    driver.core.check_integrity()
    driver.drain()
    assert driver.tokens["live", 0] == expected(bystander)


def test_prompts_that_do_not_fit_are_refused_with_what_fits():
    driver = Driver(num_blocks=64)
    with pytest.raises(PromptTooLongError, match=r"length is 64 tokens. However, .* at most 63 fit") as refused:
        driver.core.add(request("x", 64, max_tokens=None))
    assert refused.value.code == "context_length_exceeded"
    driver.run(request("fits", 63, max_tokens=None))
    small = Driver(num_blocks=6)
    with pytest.raises(PromptTooLongError, match=r"is 20 tokens here, for the KV cache .* at most 19 fit"):
        small.core.add(request("x", 20, max_tokens=None))
    with pytest.raises(PromptTooLongError, match=r"is 20 tokens .* max_tokens=16 does not fit: at most 15"):
        small.core.add(request("x", 5, max_tokens=16))
    small.run(request("fits", 5, max_tokens=15))


def test_values_may_be_spelled_as_vllms():
    given = {"dtype": "half", "attention_backend": "TRITON_ATTN", "quantization": "gptq_marlin"}
    config = EngineConfig("fake", **given)
    assert (config.dtype, config.attention_backend, config.quantization) == ("float16", "triton", "gptq")


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "block_size"])
def test_sizes_that_no_memory_holds_are_refused(name):
    with pytest.raises(ConfigError, match=rf"^{name} must be at most \d+, not {1 << 60}$") as refused:
        EngineConfig("fake", **{name: 1 << 60})
    assert refused.value.flag == name


def test_settings_that_cannot_work_are_refused():
    config = EngineConfig("fake", max_model_len=8)
    with pytest.raises(ConfigError, match="num_kv_blocks must be at least 2"):
        EngineCore(config, FakeExecutor(1, 16, VOCAB), (EOS,), VOCAB, 1)
    with pytest.raises(ConfigError, match="must lie in the model's vocabulary"):
        EngineCore(config, FakeExecutor(4, 16, VOCAB), (VOCAB,), VOCAB, 4)


def test_an_engine_goes_on_when_all_that_shared_a_step_with_a_starving_one_are_aborted():
    driver = Driver(max_num_batched_tokens=2, long_prefill_token_threshold=1)
    driver.core.add(request("starves", 8))
    driver.core.add(request("two", 1, n=2, ignore_eos=True))
    driver.step()
    driver.step()
    assert [event.what for event in driver.accounts.flight.story("starves")] == [Wait.BUDGET]
    driver.core.abort("starves")
    driver.core.abort("two")
    driver.run(request("next", 3))
    assert driver.tokens["next", 0] == expected(request("next", 3))


def test_aborting_what_is_not_there_is_said():
    driver = Driver()
    driver.run(request("done", 3))
    assert not driver.core.abort("done")
    assert not driver.core.abort("never")


# ---- when something breaks ---------------------------------------------------------------------------------

ANYTHING = StructuredOutput("json_object")


class NoEnd(GrammarState):
    """Allows all tokens but the end of sequence."""

    def accept(self, token_id):
        return token_id != EOS

    def fill(self, bits):
        bits[:] = -1
        bits[0] = -2

    @property
    def finished(self):
        return False


class AllButTheEnd(CompiledGrammar):
    def state(self, budget=None):
        return NoEnd()


STAGES = [
    (SlotTables, "fill", lambda args: args[1][0] == 13),
    (Slots, "find_prefix", lambda args: args[0].request.request_id == "bad"),
    (Slots, "place", lambda args: args[0].request.request_id == "bad"),
    (Slots, "grow", lambda args: args[0].request.request_id == "bad"),
    (Slots, "seal", lambda args: args[0].request.request_id == "bad"),
    (BlockManager, "seal", lambda args: token_bytes([13, 12, 11, 10]) in args[2]),
    (Slots, "fork", lambda args: args[0].request.request_id == "bad"),
    (Slots, "part", lambda args: args[0].request.request_id == "bad"),
    (Updater, "_end_if_done", lambda args: args[0].request.request_id == "bad"),
    (SamplingTable, "write", lambda args: args[1].request.request_id == "bad"),
    (SamplingBuilder, "_endings", lambda args: True),
    (NoEnd, "fill", lambda args: True),
    (NoEnd, "accept", lambda args: True),
    (prompt_results, "_prompt_logprobs", lambda args: True),
]


@pytest.mark.parametrize(
    ("owner", "stage", "strikes"), STAGES, ids=[f"{owner.__name__}.{stage}" for owner, stage, _ in STAGES]
)
def test_a_host_side_failure_leaves_31_others_exact(owner, stage, strikes, monkeypatch, caplog):
    whole = getattr(owner, stage)

    def faulty(first, *args):
        if strikes(args):
            raise RuntimeError("struck")
        return whole(first, *args)

    monkeypatch.setattr(owner, stage, faulty)
    bystanders = [request(f"r{i}", 1 + i % 9, seed=i, n=1 + i % 2, temperature=1.0) for i in range(31)]
    driver = Driver(num_blocks=256, max_num_seqs=64, max_num_batched_tokens=64)
    rules = {"bad_words": "x", "bad_words_ids": ((1, 2), (1, 2, 3)), "prompt_logprobs": 0, "structured": ANYTHING}
    bad = request("bad", (13, 12, 11, 10, 9), n=2, max_tokens=9, **rules)
    with caplog.at_level(logging.CRITICAL, "engine"):
        for one in bystanders[:13]:
            driver.core.add(one)
        driver.core.add(bad, AllButTheEnd())
        driver.run(*bystanders[13:])
    reasons = {driver.reason("bad", 0), driver.reason("bad", 1)}
    assert reasons == {FinishReason.ERROR}
    error = "GrammarError" if (owner, stage) == (NoEnd, "fill") else "RuntimeError"
    assert driver.finished["bad", 0].message == f"the engine failed on this request ({error})"
    for one in bystanders:
        for choice in range(one.params.n):
            assert driver.tokens[one.request_id, choice] == expected(one, choice)


class Unscored(FakeExecutor):
    """Has no memory for steps that score prompts, or none for the scores alone."""

    def __init__(self, whole_step, *sizes):
        super().__init__(*sizes)
        self.whole_step = whole_step

    def execute(self, inputs, sampling):
        if sampling.prompt is not None and self.whole_step:
            raise StepMemoryError("no room")
        outputs = super().execute(inputs, sampling)
        outputs.prompt_logprobs = None
        return outputs


@pytest.mark.parametrize("whole_step", [True, False])
def test_memory_that_the_scores_of_a_prompt_lack_costs_their_request_alone(whole_step):
    driver = Driver(executor=Unscored(whole_step, 64, 4, VOCAB))
    asks, newer = request("asks", 5, prompt_logprobs=2, n=2), request("newer", 6, seed=1, temperature=1.0)
    older = request("older", 4, seed=2, temperature=1.0)
    driver.run(older, asks, newer)
    for choice in range(2):
        end = driver.finished["asks", choice]
        assert (end.reason, end.code) == (FinishReason.ERROR, "prompt_logprobs_out_of_memory")
        assert "ask for none" in end.message
    for one in (older, newer):
        assert driver.tokens[one.request_id, 0] == expected(one)
    driver.run(request("again", 5))
    assert driver.reason("again") is not FinishReason.ERROR


def test_blocks_sealed_together_fail_one_by_one(monkeypatch, caplog):
    driver = Driver()
    good, bad = request("good", 3, ignore_eos=True), request("bad", (13, 12, 11), ignore_eos=True)
    seal = BlockManager.seal

    def faulty(self, blocks, digests, contents):
        if any(token_bytes([13]) == tokens[:4] for tokens in contents):
            raise RuntimeError("struck")
        seal(self, blocks, digests, contents)

    monkeypatch.setattr(BlockManager, "seal", faulty)
    with caplog.at_level(logging.CRITICAL, "engine"):
        driver.run(good, bad)
    assert driver.reason("bad") is FinishReason.ERROR
    assert driver.tokens["good", 0] == expected(good)
    assert driver.core.stats().kv_blocks_cached == 2


def test_inputs_that_cannot_be_made_end_the_culprit_in_the_same_step(monkeypatch):
    build = SamplingBuilder.build

    def faulty(self, schedule):
        if any(sequence.request.request_id == "bad" for sequence in schedule.samples):
            raise RuntimeError("struck")
        return build(self, schedule)

    monkeypatch.setattr(SamplingBuilder, "build", faulty)
    driver = Driver()
    good = request("good", 5, n=2, temperature=1.0)
    driver.core.add(good)
    driver.core.add(request("bad", 5, n=2))
    report = driver.step()
    assert [s.request.request_id for s in report.sequences] == ["good", "good"]
    assert driver.reason("bad", 0) is driver.reason("bad", 1) is FinishReason.ERROR
    driver.drain()
    assert [driver.tokens["good", i] for i in range(2)] == [expected(good, i) for i in range(2)]


def test_a_failure_of_preparing_that_is_nobodys_fault_is_not_hidden(monkeypatch):
    def build(self, schedule):
        if len(schedule.samples) > 1:
            raise RuntimeError("not one request's doing")
        return whole(self, schedule)

    whole = SamplingBuilder.build
    monkeypatch.setattr(SamplingBuilder, "build", build)
    driver = Driver()
    driver.core.add(request("a", 3))
    driver.core.add(request("b", 3))
    with pytest.raises(RuntimeError, match="not one request's doing"):
        driver.core.step()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (EngineDeadError("rank 1 died"), "rank 1 died"),
        (ValueError("surprise"), "the executor failed: surprise"),
        (np.array([1, 2], np.int32), "for 1 tokens"),
        (np.array([1], np.int64), "int64"),
        (np.array([VOCAB], np.int32), "outside the vocabulary"),
        (np.array([-1], np.int32), "outside the vocabulary"),
    ],
)
def test_an_executor_that_fails_ends_the_engine(answer, message):
    driver = Driver(executor=Broken(answer))
    driver.core.add(request("a", 3))
    with pytest.raises(EngineDeadError, match=message):
        driver.core.step()
    with pytest.raises(EngineDeadError, match="takes nothing more"):
        driver.core.step()
    with pytest.raises(EngineDeadError, match="takes nothing more"):
        driver.core.add(request("b", 3))


def test_missing_logprobs_are_noticed():
    driver = Driver(executor=Broken(np.array([1], np.int32)))
    driver.core.add(request("a", 3, logprobs=1))
    with pytest.raises(EngineDeadError, match="no log-probabilities"):
        driver.core.step()


def test_closing_twice_is_harmless_and_final():
    executor = Broken(RuntimeError())
    driver = Driver(executor=executor)
    driver.core.close()
    driver.core.close()
    assert executor.closed == 2
    with pytest.raises(EngineDeadError, match="it was closed"):
        driver.core.step()


# ---- the fake model sees what a real one would -------------------------------------------------------------


@pytest.mark.parametrize("damage", ["slot", "copy", "block"])
def test_the_fake_model_notices_wrong_slots_lost_copies_and_stale_blocks(damage):
    class Damaging(FakeExecutor):
        def execute(self, inputs, sampling):
            if damage == "slot" and inputs.num_computed_tokens.any():
                inputs.slot_mapping[0] ^= 1
            if damage == "copy":
                inputs.copy_blocks = inputs.copy_blocks[:0]
            if damage == "block" and inputs.block_tables.shape[1] > 3:
                inputs.block_tables[0, 1] = 0
            return super().execute(inputs, sampling)

    wanted = request("n", 6, n=2, temperature=1.0, max_tokens=12, ignore_eos=True)
    driver = Driver(executor=Damaging(64, 4, VOCAB))
    driver.run(wanted)
    assert [driver.tokens["n", i] for i in range(2)] != [expected(wanted, i) for i in range(2)]


def test_a_modelled_step_time_passes_on_the_given_clock():
    slept = []
    executor = FakeExecutor(64, 4, VOCAB, step_time=lambda inputs: 0.5 * inputs.num_tokens, sleep=slept.append)
    Driver(executor=executor).run(request("a", 4, max_tokens=3, ignore_eos=True))
    assert slept == [2.0, 0.5, 0.5]


@pytest.mark.parametrize(
    "damage",
    [
        lambda core: core._scheduler._slots.tables.tokens.__setitem__((-1, 0), 5),
        lambda core: core._scheduler._slots.tables.blocks.__setitem__((0, 0), 3),
        lambda core: core._scheduler._slots.tables.num_computed.__setitem__(0, 99),
        lambda core: core._scheduler._slots._free_slots.pop(),
        lambda core: core._scheduler._slots.tables.num_blocks.__setitem__(0, 1),
        lambda core: core._scheduler._batch.running.pop(),
        lambda core: setattr(core._scheduler._batch.waiting, "num_tokens", 1),
    ],
)
def test_integrity_notices_damage(damage):
    driver = Driver()
    driver.core.add(request("a", 6, ignore_eos=True))
    driver.step()
    damage(driver.core)
    with pytest.raises(IntegrityError):
        driver.core.check_integrity()


class Poisoner(FakeExecutor):
    """Declares the row of one sequence bad, by its position, from its third token on."""

    bad_position = 7

    def execute(self, inputs, sampling):
        outputs = super().execute(inputs, sampling)
        rows = (sampling.positions == self.bad_position).nonzero()[0]
        return StepOutputs(np.where(sampling.positions == self.bad_position, 0, outputs.token_ids), None, tuple(rows))


def test_logits_that_are_not_finite_end_their_own_request_and_poison_no_cache():
    driver = Driver(executor=Poisoner(64, 4, VOCAB))
    bad = request("bad", (5, 6, 7, 8, 9), max_tokens=9, ignore_eos=True)
    good = [request(f"r{i}", 2, seed=i, max_tokens=3, ignore_eos=True) for i in range(3)]
    driver.run(good[0], bad, *good[1:])
    assert driver.finished["bad", 0].reason is FinishReason.ERROR
    assert driver.tokens["bad", 0] == expected(bad)[:2]
    assert all(driver.tokens[one.request_id, 0] == expected(one) for one in good)
    assert driver.core.cached_blocks().stored == ()
