"""A model of a dozen lines for tests, benches and simulations: no weights, but a KV cache that must be right.

What it stores at a position depends on all tokens up to there, and the next token on all that is stored, read back
through the block table. A wrong slot, a lost copy, a stale block or a wrong prefix hit changes its output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from engine.report import Floats, Logprobs, PromptScores, SamplingInputs, StepInputs, StepOutputs
from engine.worker.executor import Executor, Pending
from engine.worker.sleep import KV_CACHE

Words = NDArray[np.uint64]


class Done(Pending):
    """A step that ran while it was launched."""

    def __init__(self, outputs: StepOutputs) -> None:
        self._outputs = outputs

    @override
    def result(self) -> StepOutputs:
        return self._outputs


class FakeExecutor(Executor):
    """Deterministic stand-in for a tensor-parallel group.

    in_folder: fingerprint of the weights that the next waking reads; "" = of the same.
    step_time: seconds that a step is made to last, as a function of its inputs; `sleep` lets them pass (virtual time
    hands in its own). ids: the token of each place of the cache, [num_blocks, block_size]; -1 = nothing was written.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        step_time: Callable[[StepInputs], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._shape = (num_blocks, block_size)
        self._cache = self._garbage()
        self.ids = np.full((num_blocks, block_size), -1, np.int32)
        self._vocab_size = vocab_size
        self._drawn = np.zeros(0, np.int32)  # tokens of the last step
        self.in_folder = ""
        self._step_time = step_time
        self._sleep = sleep

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        return Done(self.execute(inputs, sampling))

    @override
    def execute(self, inputs: StepInputs, sampling: SamplingInputs) -> StepOutputs:
        if self._step_time is not None:
            self._sleep(self._step_time(inputs))
        if len(inputs.copy_blocks):
            sources, targets = inputs.copy_blocks.T
            self._cache[targets] = self._cache[sources]
            self.ids[targets] = self.ids[sources]
        if len(inputs.carried):
            inputs = replace(inputs, input_ids=_filled(inputs, self._drawn))
        self._store(inputs)
        wanted = inputs.logits_indices if sampling.rows is None else inputs.logits_indices[sampling.rows]
        rows = np.searchsorted(inputs.query_start_loc, wanted, side="right") - 1
        token_ids, stuck = _draw(
            self._attend(inputs)[rows], sampling, self._vocab_size, self._histories(inputs, sampling)
        )
        self._drawn = token_ids
        outputs = StepOutputs(token_ids, stuck=stuck)
        if sampling.num_logprobs >= 0:
            outputs.logprobs = _logprobs(token_ids, sampling.num_logprobs, self._vocab_size)
            # As of the best: the chosen token -0.5, and each that follows it one less.
            after = (np.arange(self._vocab_size) - token_ids[sampling.whole_rows][:, None]) % self._vocab_size
            whole = (-0.5 - after).astype(np.float32)
            outputs.logprobs.whole = dict(zip(sampling.whole_rows.tolist(), whole, strict=True))
        if sampling.prompt is not None:
            outputs.prompt_logprobs = self._prompt_logprobs(inputs, sampling.prompt)
        if len(inputs.pooled):
            outputs.pooled = self._pooled(inputs)
        return outputs

    @override
    def sleep(self, level: int) -> None:
        self._cache = np.zeros((0, 0), np.uint64)

    @override
    def wake(self, tag: str) -> None:
        if tag == KV_CACHE:
            self._cache = self._garbage()
        elif self.in_folder:
            self.fingerprint, self.in_folder = self.in_folder, ""

    @override
    def close(self) -> None:
        """Nothing to end."""

    def _histories(self, inputs: StepInputs, sampling: SamplingInputs) -> list[NDArray[np.int32]]:
        """Return the tokens that each sample follows; none where no rule asks for them."""
        if sampling.histories is None:
            return []
        rows, _, lens = sampling.histories
        return [self.ids[inputs.block_tables[row]].reshape(-1)[:count] for row, count in zip(rows, lens, strict=True)]

    def _garbage(self) -> Words:
        return _mix(np.arange(self._shape[0] * self._shape[1]).reshape(self._shape) + 12345)

    def _store(self, inputs: StepInputs) -> None:
        lens = np.diff(inputs.query_start_loc)
        words = np.cumsum(
            _mix(inputs.input_ids.astype(np.uint64) << np.uint64(32) | inputs.positions.astype(np.uint64))
        )
        before = np.concatenate([np.zeros(1, np.uint64), words])[inputs.query_start_loc[:-1]]
        past = self._past(inputs)
        self.ids.reshape(-1)[inputs.slot_mapping] = inputs.input_ids
        self._cache.reshape(-1)[inputs.slot_mapping] = words + np.repeat(past - before, lens)

    def _past(self, inputs: StepInputs) -> Words:
        """Return what was stored at the last position before the step, [num_reqs]; 0 where there is none."""
        past = self._read(inputs, np.maximum(inputs.num_computed_tokens - 1, 0)[:, None])[:, 0]
        past[inputs.num_computed_tokens == 0] = 0
        return past

    def _stored(self, inputs: StepInputs) -> Floats:
        """Return one number per token of the step that depends on everything up to it, in [0, 1)."""
        words = _mix(self._cache.reshape(-1)[inputs.slot_mapping]) >> np.uint64(40)
        return (words / np.float32(1 << 24)).astype(np.float32)

    def _prompt_logprobs(self, inputs: StepInputs, prompt: PromptScores) -> Logprobs:
        seen = self._stored(inputs)[inputs.logits_indices[prompt.rows]]
        ranks = 1 + prompt.token_ids % self._vocab_size
        return replace(_logprobs(prompt.token_ids, prompt.num_logprobs, self._vocab_size), chosen=-seen, ranks=ranks)

    def _pooled(self, inputs: StepInputs) -> Floats:
        """Return vectors of two: sums over the rows of what was stored, and how many rows there were."""
        seen = self._stored(inputs)
        spans = inputs.pooled.tolist()
        return np.array([[seen[first:beyond].sum(), beyond - first] for first, beyond in spans], np.float32)

    def _attend(self, inputs: StepInputs) -> Words:
        """Return one word per request that depends on everything in its cache."""
        positions = np.arange(inputs.seq_lens.max(initial=0))
        words = self._read(inputs, np.broadcast_to(positions, (inputs.num_reqs, len(positions))))
        return _weighted(words, positions, positions < inputs.seq_lens[:, None])

    def _read(self, inputs: StepInputs, positions: NDArray[np.int64]) -> Words:
        block_size = self._cache.shape[1]
        blocks = np.take_along_axis(inputs.block_tables, positions // block_size, axis=1)
        return self._cache[blocks, positions % block_size]


def fake_token(tokens: Sequence[int], vocab_size: int, key: tuple[int, int] | None = None) -> int:
    """Return what follows `tokens` in the fake model, computed without any cache: the oracle of tests.

    key: (seed, choice) of a sampled sequence, None for a greedy one. Penalties and forbidden ids are not applied.
    """
    positions = np.arange(len(tokens))
    words = np.cumsum(_mix(np.array(tokens, np.uint64) << np.uint64(32) | positions.astype(np.uint64)))
    word = _weighted(words[None], positions, np.ones((1, len(tokens)), np.bool_))
    if key is not None:
        word ^= _noise(np.array([key[0]], np.int64), np.array([key[1]]), np.array([len(tokens)]))
    return int(_mix(word)[0] % np.uint64(vocab_size))


def _filled(inputs: StepInputs, drawn: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the input ids with those that the step before drew."""
    rows, samples = inputs.carried.T
    ids = inputs.input_ids.copy()
    ids[rows] = drawn[samples]
    return ids


def _draw(
    words: Words, sampling: SamplingInputs, vocab_size: int, histories: list[NDArray[np.int32]]
) -> tuple[NDArray[np.int32], tuple[int, ...]]:
    """Return the tokens, and the rows that have none to draw. histories: of each row."""
    noise = _noise(sampling.seeds, sampling.choices, sampling.positions)
    words = words ^ np.where(sampling.temperature > 0, noise, np.uint64(0))
    for row, history in enumerate(histories):
        if sampling.repetition_penalty[row] != 1 or sampling.presence_penalty[row] or sampling.frequency_penalty[row]:
            words[row : row + 1] += _mix(history).sum(dtype=np.uint64)  # any order: penalties know counts only
    token_ids = (_mix(words) % np.uint64(vocab_size)).astype(np.int32)
    stuck: list[int] = []
    for row, allowed in _allowed(sampling, vocab_size, histories).items():
        if not allowed.any():
            stuck.append(row)
            continue
        while not allowed[token_ids[row]]:
            token_ids[row] = (token_ids[row] + 1) % vocab_size
    return token_ids, tuple(stuck)


def _allowed(
    sampling: SamplingInputs, vocab_size: int, histories: list[NDArray[np.int32]]
) -> dict[int, NDArray[np.bool_]]:
    """Return what each row that is not free may draw, [vocab]. Here a negative bias is a ban."""
    free = np.ones(vocab_size, np.bool_)
    allowed: dict[int, NDArray[np.bool_]] = {}
    for row, forbidden in sampling.forbidden.items():
        allowed[row] = free.copy()
        allowed[row][list(forbidden)] = False
    pairs = [(row, *pair) for row, some in sampling.pairs.items() for pair in zip(*some, strict=True)]
    for row, token, banned in [*pairs, *sampling.endings.tolist()]:
        if sampling.histories.lens[row] > sampling.histories.starts[row] and histories[row][-1] == token:
            allowed.setdefault(row, free.copy())[banned] = False
    for row, (ids, biases) in sampling.biases.items():
        allowed[row] = allowed.get(row, free) & ~np.isin(np.arange(vocab_size), ids[biases < 0])
    for row, ids in sampling.allowed.items():
        allowed[row] = allowed.get(row, free) & np.isin(np.arange(vocab_size), ids)
    if sampling.masks is not None:
        rows, bits = sampling.masks()
        for row, words in zip(rows.tolist(), bits, strict=True):
            flags = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
            allowed[row] = allowed.get(row, free) & flags.astype(np.bool_)
    return allowed


def _logprobs(token_ids: NDArray[np.int32], count: int, vocab_size: int) -> Logprobs:
    top_ids = (token_ids[:, None] + np.arange(count)) % vocab_size
    top = np.broadcast_to(-0.5 - np.arange(count), top_ids.shape)
    return Logprobs(np.full(len(token_ids), -0.5, np.float32), top_ids.astype(np.int32), top.astype(np.float32))


def _weighted(words: Words, positions: NDArray[np.int64], seen: NDArray[np.bool_]) -> Words:
    return np.where(seen, words * _mix(positions), np.uint64(0)).sum(axis=1, dtype=np.uint64)


def _noise(seeds: NDArray[np.int64], choices: NDArray[np.int32], positions: NDArray[np.int32]) -> Words:
    return _mix(_mix(_mix(seeds) + choices.astype(np.uint64)) + positions.astype(np.uint64))


def _mix(values: NDArray[np.int64] | NDArray[np.int32] | Words) -> Words:
    """Scatter words (the finaliser of splitmix64)."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
