"""Random histories of an engine: whatever happens around a request, its tokens are those of an undisturbed run."""

from collections import defaultdict
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar
from engine.report import TokenLogprob
from engine.request import FinishReason, GrammarState, Request
from engine.sampling_params import StructuredOutput
from tests.engine.engine_driver import EOS, VOCAB, Driver, request

PROMPT = tuple(1 + i % (VOCAB - 1) for i in range(30))
CONTEXT = 40

shapes = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 12),
        "long_prefill_token_threshold": st.sampled_from([0, 1, 3]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
    }
)
params = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0.0, 1.0]),
        "max_tokens": st.integers(1, 16),
        "ignore_eos": st.booleans(),
    },
    optional={
        "min_tokens": st.just(1),
        "stop_token_ids": st.sampled_from([(3,), (5, 7, 11, 13, 17, 19)]),
        "presence_penalty": st.just(0.5),
        "logit_bias": st.just({7: -1.0, 9: 1.0}),
        "allowed_token_ids": st.sampled_from([tuple(range(0, VOCAB, 2))]),
        "bad_words_ids": st.just(((5,), (3, 4), (11, 12, 13))),
        "prompt_logprobs": st.integers(0, 2),
    },
)
_undisturbed: dict[tuple, dict[int, tuple[list[int], FinishReason]]] = {}
_undisturbed_prompts: dict[tuple, tuple[list[TokenLogprob], list[float] | None]] = {}


class Stepwise(CompiledGrammar):
    """Any token may come that differs from the last one by `step` at least; the end comes after `length` of them."""

    def __init__(self, step: int, length: int) -> None:
        self.step, self.length = step, length

    def state(self, budget=None) -> GrammarState:
        return StepwiseState(self)


class StepwiseState(GrammarState):
    def __init__(self, grammar: Stepwise) -> None:
        self._grammar, self._taken = grammar, []

    def _allowed(self) -> list[int]:
        if len(self._taken) == self._grammar.length:
            return [EOS]
        last = self._taken[-1] if self._taken else 0
        return [token for token in range(1, VOCAB) if abs(token - last) >= self._grammar.step]

    def accept(self, token_id: int) -> bool:
        if self.finished or token_id not in self._allowed():
            return False
        self._taken.append(token_id)
        return True

    def fill(self, bits) -> None:
        bits[:] = 0
        for token in self._allowed():
            bits.view("uint32")[token // 32] |= 1 << token % 32

    @property
    def finished(self) -> bool:
        return EOS in self._taken


def grammar_of(one: Request) -> Stepwise | None:
    wanted = one.params.structured
    return None if wanted is None else Stepwise(*map(int, wanted.text.split()))


class PromptDriver(Driver):
    """Also keeps what is told of prompts: log-probabilities by position, and pooled states."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.told: dict[str, dict[int, TokenLogprob]] = defaultdict(dict)
        self.pooled: dict[str, list[float]] = {}

    def step(self):
        ended = {key[0] for key in self.finished}
        report = super().step()
        for part in report.prompt_logprobs:
            assert part.sequence.request.request_id not in ended, "told after the end"
            told = self.told[part.sequence.request.request_id]
            first = max(part.sequence.request.num_scored_tokens, 1) + len(told)
            assert part.first == first, "a prompt token was told twice, or left out"
            told.update(enumerate(part.logprobs, first))
        for sequence, state in report.pooled:
            assert sequence.request.request_id not in {*ended, *self.pooled}, "a second state, or a late one"
            self.pooled[sequence.request.request_id] = state.tolist()
        return report


def alone(one: Request) -> PromptDriver:
    driver = PromptDriver(num_blocks=64, max_num_batched_tokens=256)
    driver.core.add(replace(one, request_id="alone", resume=None, num_scored_tokens=0), grammar_of(one))
    driver.drain()
    return driver


def undisturbed(one: Request) -> dict[int, tuple[list[int], FinishReason]]:
    """Return tokens and end of each choice of a request that has a large engine to itself."""
    key = one.prompt_token_ids, one.params, one.seed, one.pooling
    if key not in _undisturbed:
        driver = alone(one)
        _undisturbed[key] = {
            index: (driver.tokens["alone", index], driver.reason("alone", index)) for index in range(one.params.n)
        }
        _undisturbed_prompts[key] = list(driver.told["alone"].values()), driver.pooled.get("alone")
    return _undisturbed[key]


def undisturbed_prompt(one: Request) -> tuple[list[TokenLogprob], list[float] | None]:
    """Return what is told of the prompt of a request that has a large engine to itself."""
    undisturbed(one)
    return _undisturbed_prompts[one.prompt_token_ids, one.params, one.seed, one.pooling]


# What `add` draws beside the prompt's beginning and the parameters.
of_a_request = {
    "own": st.lists(st.integers(1, 3), max_size=2),
    "seed": st.integers(0, 2),
    "priority": st.integers(0, 2),
    "salt": st.sampled_from([b"", b"", b"tenant"]),
}


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps, aborts, migrates and forgets; blocks are so few that much is preempted and evicted."""

    ids = Bundle("ids")
    settings: ClassVar[dict[str, Any]] = {}

    @initialize(shape=shapes, tokens=st.integers(10, 44))
    def start(self, shape, tokens):
        shape = {**shape, **self.settings}
        self.driver = PromptDriver(num_blocks=1 + tokens // shape["block_size"], max_model_len=CONTEXT, **shape)
        self.accepted: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.cut_short: set[tuple[str, int]] = set()

    def submit(self, one):
        before = self.driver.core.stats()
        try:
            self.driver.core.add(one, grammar_of(one))
        except InvalidRequestError as error:
            assert error.param in ("prompt", "max_tokens", "n"), error
            assert self.driver.core.stats() == before
            return multiple()
        self.accepted[one.request_id] = one
        return one.request_id

    @rule(
        target=ids,
        shared=st.sampled_from([1, 2, 4, 8, 8, 12, 16, 19]),
        asked=params,
        **of_a_request,
    )
    def add(self, shared, own, asked, seed, priority, salt):
        prompt = PROMPT[:shared] + tuple(own)
        one = request(f"r{len(self.accepted)}", prompt, seed, **asked)
        return self.submit(replace(one, priority=priority, cache_salt=salt))

    @rule(target=ids, shared=st.sampled_from([1, 4, 8, 19]), pooling=st.sampled_from(["last", "mean"]))
    def add_pooled(self, shared, pooling):
        one = request(f"r{len(self.accepted)}", PROMPT[:shared], max_tokens=1)
        return self.submit(replace(one, pooling=pooling))

    @rule(
        target=ids,
        shared=st.sampled_from([1, 4, 8]),
        n=st.integers(1, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        grammar=st.sampled_from(["1 0", "5 3", "20 30"]),
    )
    def add_structured(self, shared, n, temperature, grammar):
        wanted = StructuredOutput("grammar", grammar)
        asked = {"n": n, "temperature": temperature, "max_tokens": 16, "structured": wanted}
        return self.submit(request(f"r{len(self.accepted)}", PROMPT[:shared], **asked))

    @rule(count=st.integers(1, 10))
    def step(self, count):
        for _ in range(count):
            report = self.driver.step()
            assert report.num_tokens <= self.driver.core._scheduler._budget

    @rule(request_id=ids)
    def abort(self, request_id):
        live = self.is_live(request_id)
        assert self.driver.core.abort(request_id) == live
        if live:
            self.aborted.add(request_id)

    @rule(request_id=ids, choice=st.integers(0, 2))
    def finish_choice(self, request_id, choice):
        begun = bool(self.driver.tokens[request_id, choice] or self.log(self.accepted[request_id], choice))
        open_until_now = self.is_live(request_id) and (request_id, choice) not in self.cut_short
        ended = (request_id, choice) in self.driver.finished
        done = self.driver.core.finish_choice(request_id, choice)
        assert done == (begun and open_until_now and not ended)
        if done:
            self.cut_short.add((request_id, choice))

    @rule(target=ids, request_id=ids)
    def migrate(self, request_id):
        """Take a request away and let it go on under another id, as if another replica had died."""
        old = self.accepted[request_id]
        unfinished = [
            index
            for index in (range(old.params.n) if old.resume is None else old.resume)
            if (request_id, index) not in {*self.driver.finished, *self.cut_short}
        ]
        if not unfinished or request_id in self.aborted:
            return multiple()
        self.abort(request_id)
        logs = {index: (*self.log(old, index), *self.driver.tokens[request_id, index]) for index in unfinished}
        if not any(logs.values()) and len(unfinished) == old.params.n:
            logs = None
        scored = max(old.num_scored_tokens, 1) + len(self.driver.told[request_id])
        moved = replace(old, request_id=f"r{len(self.accepted)}", resume=logs, num_scored_tokens=scored)
        return self.submit(moved)

    @rule()
    def forget(self):
        self.driver.core.reset_prefix_cache()

    @invariant()
    def sound(self):
        if not hasattr(self, "driver"):
            return
        self.driver.core.check_integrity()
        stats = self.driver.core.stats()
        assert 0 <= stats.kv_usage <= 1
        ended = {key[0] for key in {*self.driver.finished, *self.cut_short}}
        live = {one for one in self.accepted if self.is_live(one)}
        assert set(self.accepted) == ended | self.aborted | live

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.driver.drain()
        for request_id, one in self.accepted.items():
            for index in range(one.params.n) if one.resume is None else one.resume:
                self.check(one, request_id, index)
        stats = self.driver.core.stats()
        assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
        assert stats.outstanding_tokens == 0

    def check(self, one, request_id, index):
        self.check_prompt(one, request_id)
        tokens, reason = undisturbed(one)[index]
        got = [*self.log(one, index), *self.driver.tokens[request_id, index]]
        end = self.driver.reason(request_id, index)
        if end is FinishReason.ABORT:
            assert request_id in self.aborted or (request_id, index) in self.cut_short
            assert got == tokens[: len(got)]
        else:
            assert (got, end) == (tokens, reason)

    def check_prompt(self, one, request_id):
        scores, state = undisturbed_prompt(one)
        told = self.driver.told[request_id]
        assert all(scores[position - 1] == entry for position, entry in told.items())
        whole = any(self.driver.tokens[request_id, choice] for choice in range(one.params.n))
        if whole and one.params.prompt_logprobs is not None:
            assert len(told) == len(one.prompt_token_ids) - max(one.num_scored_tokens, 1), "scores are missing"
        if request_id not in self.aborted and state is not None:
            assert self.driver.pooled[request_id] == pytest.approx(state)

    def is_live(self, request_id):
        return request_id in self.driver.core._scheduler

    @staticmethod
    def log(one, index):
        return () if one.resume is None else one.resume.get(index, ())


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=25)
