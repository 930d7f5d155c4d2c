"""Steps whose rows draw one to three tokens: how many is known only from their results."""

import random
from dataclasses import replace

import numpy as np
import pytest
from typing_extensions import override

from engine.errors import EngineDeadError
from engine.report import StepOutputs
from engine.request import FinishReason
from tests.engine.engine_driver import EOS, VOCAB, Driver, expected, request
from tests.engine.test_core import ANYTHING, AllButTheEnd, NoEnd
from tests.fake_executor import FakeExecutor, fake_token

MOST = 3


class SeveralDraws(FakeExecutor):
    """Draws runs of tokens, each as the model would one after another; how long one is depends on its position."""

    most_draws = MOST

    def __init__(self, num_blocks=64, block_size=4):
        super().__init__(num_blocks, block_size, VOCAB)
        self.num_steps = 0

    @override
    def execute(self, inputs, sampling):
        self.num_steps += 1
        outputs = super().execute(inputs, sampling)
        rows = np.searchsorted(inputs.query_start_loc, inputs.logits_indices, side="right") - 1
        runs = [self.run(inputs, sampling, row, sample, outputs) for sample, row in enumerate(rows.tolist())]
        tokens = np.array([token for run in runs for token in run], np.int32)
        return self.result(outputs, tokens, np.array([len(run) for run in runs], np.int32))

    def run(self, inputs, sampling, row, sample, outputs):
        """Return the tokens that a sample draws, the first of which is known."""
        seen = self.ids[inputs.block_tables[row]].reshape(-1)[: inputs.seq_lens[row]].tolist()
        key = (int(sampling.seeds[sample]), int(sampling.choices[sample])) if sampling.temperature[sample] else None
        run = [int(outputs.token_ids[sample])]
        for _ in range(len(seen) % MOST):
            run.append(fake_token([*seen, *run], VOCAB, key))
        return run

    def result(self, outputs, tokens, counts):
        logprobs = outputs.logprobs
        if logprobs is not None:
            rows = np.repeat(np.arange(len(counts)), counts)
            top_ids, top = logprobs.top_ids[rows], logprobs.top[rows]
            logprobs = replace(logprobs, chosen=-tokens.astype(np.float32), top_ids=top_ids, top=top)
        return replace(outputs, token_ids=tokens, counts=counts, logprobs=logprobs)


def crowd(count, **params):
    dice = random.Random(count)
    return [
        request(
            f"r{number}",
            tuple(dice.randrange(1, VOCAB) for _ in range(dice.randrange(1, 14))),
            seed=number,
            n=dice.choice([1, 1, 2]),
            temperature=dice.choice([0.0, 1.0]),
            max_tokens=dice.randrange(1, 20),
            **params,
        )
        for number in range(count)
    ]


def check_exact(driver, some):
    for one in some:
        for choice in range(one.params.n):
            wanted = expected(one, choice)
            assert driver.tokens[one.request_id, choice] == wanted
            finish = driver.finished[one.request_id, choice]
            assert finish.sequence.num_output_tokens == len(wanted)
            assert finish.reason is (FinishReason.STOP if wanted[-1] == EOS else FinishReason.LENGTH)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "budget"), [(200, 16), (14, 5), (14, 40)])
def test_runs_are_exact_also_where_sequences_are_preempted(num_blocks, budget, caching):
    shape = {"max_model_len": 40, "max_num_batched_tokens": budget, "enable_prefix_caching": caching}
    driver, some = Driver(num_blocks, SeveralDraws(num_blocks), **shape), crowd(60)
    driver.run(*some)
    check_exact(driver, some)
    stats = driver.core.stats()
    assert stats.generated_tokens == sum(map(len, driver.tokens.values()))
    assert bool(stats.preemptions) is (num_blocks == 14)
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
    assert stats.outstanding_tokens == 0


def test_a_step_brings_more_tokens_than_rows():
    executor = SeveralDraws()
    driver, one = Driver(executor=executor), request("a", 4, max_tokens=30, ignore_eos=True)
    driver.run(one)
    assert driver.tokens["a", 0] == expected(one)
    assert executor.num_steps < 25


def test_a_run_is_cut_behind_the_token_that_ends_its_sequence():
    free = request("free", 5, max_tokens=12, ignore_eos=True)
    for place, token in enumerate(expected(free)):
        driver = Driver(executor=SeveralDraws())
        driver.run(replace(free, params=replace(free.params, stop_token_ids=(token,))))
        wanted = expected(free)[: expected(free).index(token) + 1]
        assert driver.tokens["free", 0] == wanted, place
        assert driver.finished["free", 0].sequence.stop_token == token


def test_a_run_of_tokens_that_all_end_their_sequence_is_cut_behind_the_first():
    driver = Driver(executor=SeveralDraws())
    some = [request(f"r{size}", size, stop_token_ids=tuple(range(VOCAB))) for size in range(1, 7)]
    driver.run(*some)
    for one in some:
        assert driver.tokens[one.request_id, 0] == expected(one)[:1]
        assert driver.finished[one.request_id, 0].reason is FinishReason.STOP


@pytest.mark.parametrize("most", range(1, 9))
def test_a_run_is_cut_at_the_most_tokens_that_are_wanted(most):
    driver, one = Driver(executor=SeveralDraws()), request("a", 5, max_tokens=most, ignore_eos=True)
    driver.run(one)
    assert driver.tokens["a", 0] == expected(one)
    assert driver.reason("a") is FinishReason.LENGTH


def test_every_token_of_a_run_has_its_log_probability():
    driver, asks = Driver(executor=SeveralDraws()), request("asks", 5, max_tokens=11, logprobs=2, ignore_eos=True)
    driver.run(asks, request("does not", 3))
    assert driver.tokens["asks", 0] == expected(asks)
    found = driver.logprobs["asks", 0]
    assert [one.token_id for one in found] == expected(asks)
    assert [one.logprob for one in found] == [-float(token) for token in expected(asks)]


def test_no_step_is_launched_before_it_is_known_how_many_tokens_were_drawn():
    driver, some = Driver(executor=SeveralDraws(), async_scheduling=True), crowd(20)
    driver.run(*some)
    check_exact(driver, some)
    assert driver.core.stats().steps_ahead == 0
    assert driver.core.stats().steps_held > 0


def test_a_grammar_takes_every_token_of_a_run(monkeypatch):
    taken, accept = [], NoEnd.accept
    monkeypatch.setattr(NoEnd, "accept", lambda self, token: taken.append(token) or accept(self, token))
    driver, one = Driver(executor=SeveralDraws()), request("a", 5, max_tokens=9, structured=ANYTHING)
    driver.core.add(one, AllButTheEnd())
    driver.drain()
    assert taken == driver.tokens["a", 0]


def test_what_an_abort_takes_away_and_a_bad_row_does_not_reach_the_others():
    class Poisoned(SeveralDraws):
        @override
        def run(self, inputs, sampling, row, sample, outputs):
            run = super().run(inputs, sampling, row, sample, outputs)
            return [0] if self.num_steps == 4 and sample == 1 else run

        @override
        def result(self, outputs, tokens, counts):
            failed = (1,) if self.num_steps == 4 else ()
            return replace(super().result(outputs, tokens, counts), failed=failed)

    driver = Driver(executor=Poisoned(), max_num_batched_tokens=64)
    some = [request(f"r{i}", 3 + i, seed=i, temperature=1.0, max_tokens=20, ignore_eos=True) for i in range(4)]
    for one in some:
        driver.core.add(one)
    for _ in range(6):
        driver.step()
    driver.core.abort("r3")
    driver.drain()
    assert driver.reason("r1") is FinishReason.ERROR
    for one in some:
        wanted = expected(one)
        found = driver.tokens[one.request_id, 0]
        assert found == (wanted if one.request_id in ("r0", "r2") else wanted[: len(found)])


@pytest.mark.parametrize("counts", [[0], [MOST + 1], [1, 1], []])
def test_runs_that_cannot_be_are_the_end_of_the_engine(counts):
    class Wrong(SeveralDraws):
        @override
        def result(self, outputs, tokens, right):
            return StepOutputs(np.zeros(sum(counts), np.int32), counts=np.array(counts, np.int32))

    driver = Driver(executor=Wrong())
    driver.core.add(request("a", 5))
    with pytest.raises(EngineDeadError, match="other than 1 to 3 tokens"):
        driver.step()
