"""Log-probabilities of prompts and pooled states on the fake model: whole, once, whatever happens on the way."""

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import InvalidRequestError
from engine.request import FinishReason
from tests.engine.engine_driver import VOCAB, Driver, expected, request
from tests.fake_executor import FakeExecutor


class Prompts(Driver):
    """Also keeps what is told of prompts, and checks that each token's is told once and in order."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.told, self.pooled, self.computed = {}, {}, 0

    def step(self):
        report = super().step()
        self.computed += report.num_tokens
        for part in report.prompt_logprobs:
            entries = self.told.setdefault(part.sequence.request.request_id, [])
            assert part.first == len(entries) + 1
            entries.extend(part.logprobs)
        for sequence, state in report.pooled:
            assert sequence.request.request_id not in self.pooled
            self.pooled[sequence.request.request_id] = state
        return report


def told_by(driver, asked):
    driver.run(asked)
    return driver.told.get(asked.request_id, [])


def reference(length=20):
    return told_by(Prompts(max_num_batched_tokens=64), request("r", length, prompt_logprobs=2))


@pytest.mark.parametrize("budget", [3, 7, 64])
def test_each_prompt_token_but_the_first_is_told_once_in_any_chunks(budget):
    found = told_by(Prompts(max_num_batched_tokens=budget), request("r", 20, prompt_logprobs=2))
    assert [one.token_id for one in found] == list(request("r", 20).prompt_token_ids[1:])
    assert found == reference()
    assert all(len(one.top) == 2 for one in found)


def test_a_cached_prefix_is_computed_again_and_tells_the_same():
    driver = Prompts()
    driver.run(request("first", 20))
    before = driver.computed
    assert told_by(driver, request("r", 20, prompt_logprobs=2)) == reference()
    assert driver.computed - before == 20 + 7  # the prompt, and all outputs but the last
    before = driver.computed
    driver.run(request("again", 20))
    assert driver.computed - before < 20


def test_what_was_told_before_a_migration_is_not_told_or_computed_again():
    whole = reference()
    driver = Prompts()
    driver.run(request("first", 20))
    before = driver.computed
    moved = replace(request("r", 20, prompt_logprobs=2), num_scored_tokens=14, resume={0: ()})
    driver.core.add(moved)
    parts = []
    while driver.core.has_unfinished:
        report = driver.core.step()
        driver.computed += report.num_tokens
        parts += report.prompt_logprobs
    assert parts[0].first == 14
    assert [one for part in parts for one in part.logprobs] == whole[13:]
    assert driver.computed - before == 20 - 12 + 7  # three blocks of four came from the cache


def test_a_prompt_of_one_token_has_nothing_to_tell():
    driver = Prompts()
    assert told_by(driver, request("r", 1, prompt_logprobs=0)) == []
    assert driver.reason("r") is FinishReason.LENGTH


def test_choices_share_what_is_told_and_bystanders_are_told_nothing():
    driver = Prompts()
    driver.run(request("r", 20, n=3, prompt_logprobs=2), request("by", 9), request("other", 11, prompt_logprobs=0))
    assert driver.told["r"] == reference()
    assert sorted(driver.told) == ["other", "r"]
    assert len(driver.told["other"]) == 10


def test_preempted_prompts_are_told_once():
    driver = Prompts(num_blocks=17, enable_prefix_caching=False)
    for number in range(6):
        driver.core.add(request(f"r{number}", 20, prompt_logprobs=2, max_tokens=24, ignore_eos=True))
    driver.drain()
    assert driver.core.stats().preemptions
    assert [driver.told[f"r{number}"] for number in range(6)] == [reference()] * 6


def test_a_preempted_choice_does_not_tell_of_the_prompt_again():
    driver = Prompts(num_blocks=17, enable_prefix_caching=False)
    driver.run(request("r", 20, n=3, prompt_logprobs=2, max_tokens=24, ignore_eos=True))
    assert driver.core.stats().preemptions
    assert driver.told["r"] == reference()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("length", [1, 4, 20])
def test_a_pooled_prompt_ends_with_its_state_and_draws_no_token(pooling, length):
    states = []
    for budget in (3, 64):
        driver = Prompts(max_num_batched_tokens=budget)
        tokens = driver.run(replace(request("e", length), pooling=pooling), request("by", 9))
        assert ("e", 0) not in tokens
        assert len(tokens["by", 0]) > 0
        assert driver.reason("e") is FinishReason.STOP
        assert driver.core.stats().kv_usage == 0
        states.append(driver.pooled["e"])
    np.testing.assert_allclose(states[0], states[1], rtol=1e-6)
    assert states[0][1] == 1.0  # so many rows for so many tokens


def test_the_last_state_uses_the_cache_and_the_mean_does_not():
    driver = Prompts()
    driver.run(request("first", 20))
    before = driver.computed
    driver.run(replace(request("last", 20), pooling="last"))
    assert driver.computed - before == 4
    before = driver.computed
    driver.run(replace(request("mean", 20), pooling="mean"))
    assert driver.computed - before == 20


def test_choices_of_a_pooled_prompt_are_refused():
    with pytest.raises(InvalidRequestError, match="n must be 1") as caught:
        Prompts().core.add(replace(request("e", 5, n=2), pooling="last"))
    assert caught.value.param == "n"


class Poisoned(FakeExecutor):
    """Gives NaN for what is asked of prompts."""

    def execute(self, inputs, sampling):
        outputs = super().execute(inputs, sampling)
        if outputs.pooled is not None:
            outputs.pooled[:] = np.nan
        if outputs.prompt_logprobs is not None:
            outputs.prompt_logprobs.chosen[-1] = np.nan
        return outputs


@pytest.mark.parametrize(
    "bad",
    [replace(request("bad", 9), pooling="last"), request("bad", 9, prompt_logprobs=0)],
    ids=["pooled", "scored"],
)
def test_states_that_are_not_finite_end_their_own_request_and_stay_in_no_cache(bad):
    driver, by = Prompts(executor=Poisoned(64, 4, VOCAB)), request("by", 6)
    driver.run(bad, by)
    assert driver.reason("bad") is FinishReason.ERROR
    assert "PoisonedLogitsError" in driver.finished["bad", 0].message
    assert driver.tokens["by", 0] == expected(by)
    before = driver.computed
    driver.run(request("again", 9, max_tokens=1))
    assert driver.computed - before == 9


@pytest.mark.parametrize("choices", [1, 2])
def test_scores_that_are_not_finite_are_an_error_even_where_the_last_token_was_drawn(choices):
    driver, by = Prompts(executor=Poisoned(64, 4, VOCAB)), request("by", 6)
    driver.run(request("bad", 9, prompt_logprobs=0, max_tokens=1, n=choices), by)
    for choice in range(choices):
        assert driver.reason("bad", choice) is FinishReason.ERROR
    assert driver.tokens["by", 0] == expected(by)
