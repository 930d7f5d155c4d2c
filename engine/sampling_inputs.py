"""Sampling parameters by slot, written once at admission, and the rows of them that a step needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.grammar.masks import MaskMaker
from engine.report import Floats, Ints, SamplingInputs
from engine.request import Sequence
from engine.sampling_params import SamplingParams
from engine.schedule import Index, Schedule
from engine.tables import Tables

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class Rules:
    """What a sequence may draw, as arrays made once."""

    biases: tuple[Ints, Floats] | None = None
    allowed: Ints | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, params: SamplingParams) -> Rules:
        """Return the rules of `params`; `NO_RULES` itself when there are none."""
        if not (params.logit_bias or params.allowed_token_ids or params.bad_words_ids):
            return NO_RULES
        ids, biases = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        return cls(
            (np.array(ids, np.int32), np.array(biases, np.float32)) if ids else None,
            np.array(params.allowed_token_ids, np.int32) if params.allowed_token_ids else None,
            params.bad_words_ids,
        )


NO_RULES = Rules()


class SamplingTable:
    """One row of parameters per slot. [S] each."""

    def __init__(self, num_slots: int) -> None:
        self.temperature: Floats = np.zeros(num_slots, np.float32)
        self.top_k: Ints = np.zeros(num_slots, np.int32)
        self.top_p: Floats = np.ones(num_slots, np.float32)
        self.min_p: Floats = np.zeros(num_slots, np.float32)
        self.seeds: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.choices: Ints = np.zeros(num_slots, np.int32)
        self.repetition_penalty: Floats = np.ones(num_slots, np.float32)
        self.presence_penalty: Floats = np.zeros(num_slots, np.float32)
        self.frequency_penalty: Floats = np.zeros(num_slots, np.float32)
        self.penalised: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.num_logprobs: Ints = np.full(num_slots, NO_LOGPROBS, np.int32)
        self.stops_from: Ints = np.zeros(num_slots, np.int32)  # position before which no stop id may be drawn
        self.stop_ids: list[tuple[int, ...]] = [()] * num_slots
        self.ruled: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)  # has a bias, allowed ids or bad words
        self.structured: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.looks_back: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)  # draws by what was drawn before
        self.rules: list[Rules] = [NO_RULES] * num_slots

    def write(self, slot: int, sequence: Sequence, stop_ids: tuple[int, ...]) -> None:
        """Fill a row. stop_ids: what would end the sequence, kept away until it has `min_tokens`."""
        params = sequence.request.params
        self.temperature[slot] = 0.0 if params.greedy else params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seeds[slot] = sequence.request.seed
        self.choices[slot] = sequence.index
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.penalised[slot] = params.penalised
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.stops_from[slot] = sequence.num_prompt_tokens + params.min_tokens if stop_ids else 0
        self.stop_ids[slot] = stop_ids
        self.rules[slot] = rules = Rules.of(params)
        self.ruled[slot] = rules is not NO_RULES
        self.structured[slot] = structured = sequence.grammar is not None
        self.looks_back[slot] = structured or params.penalised or any(len(word) > 1 for word in rules.bad_words)


@dataclass(slots=True)
class _Rows:
    """What stays the same while the sampled sequences do."""

    version: int
    inputs: SamplingInputs
    penalised: Index  # rows with a penalty
    held_back: Index  # rows with a minimum of tokens
    worded: Index  # rows with bad words
    structured: list[int]  # rows with a grammar


class SamplingBuilder:
    """Makes `SamplingInputs`. The arrays of one call are overwritten by the next."""

    def __init__(self, tables: Tables, params: SamplingTable, masks: MaskMaker) -> None:
        self._tables = tables
        self._params = params
        self._masks = masks
        self._rows: _Rows | None = None

    def build(self, schedule: Schedule) -> SamplingInputs:
        """Return the parameters of the sequences that draw, and what their draws depend on beside the logits."""
        rows = self._rows
        if rows is None or not schedule.version or rows.version != schedule.version:
            rows = self._rows = self._gather(schedule)
        inputs = rows.inputs
        inputs.positions = schedule.seq_lens if schedule.decode else schedule.seq_lens[schedule.sample_rows]
        if rows.held_back.size or rows.worded.size:
            inputs.forbidden = self._forbidden(rows, schedule.sample_slots, inputs.positions)
        if rows.structured:
            grammars = [schedule.samples[row].grammar for row in rows.structured]
            inputs.masks = self._masks.start(rows.structured, [state for state in grammars if state is not None])
        if rows.penalised.size:
            inputs.output_ids = self._history(rows.penalised, schedule.sample_slots, of_prompt=False)
        return inputs

    def _gather(self, schedule: Schedule) -> _Rows:
        table, slots = self._params, schedule.sample_slots
        inputs = SamplingInputs(
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            seeds=table.seeds[slots],
            choices=table.choices[slots],
            positions=schedule.seq_lens[schedule.sample_rows],
            repetition_penalty=table.repetition_penalty[slots],
            presence_penalty=table.presence_penalty[slots],
            frequency_penalty=table.frequency_penalty[slots],
            num_logprobs=int(table.num_logprobs[slots].max(initial=NO_LOGPROBS)),
        )
        held_back = (table.stops_from[slots] > inputs.positions).nonzero()[0]
        penalised = table.penalised[slots].nonzero()[0]
        if penalised.size:
            inputs.prompt_ids = self._history(penalised, slots, of_prompt=True)
        rules = [(row, table.rules[slots[row]]) for row in table.ruled[slots].nonzero()[0].tolist()]
        inputs.biases = {row: rule.biases for row, rule in rules if rule.biases is not None}
        inputs.allowed = {row: rule.allowed for row, rule in rules if rule.allowed is not None}
        worded = np.array([row for row, rule in rules if rule.bad_words], np.intp)
        structured = table.structured[slots].nonzero()[0].tolist()
        return _Rows(schedule.version, inputs, penalised, held_back, worded, structured)

    def _forbidden(self, rows: _Rows, slots: Index, positions: Ints) -> dict[int, tuple[int, ...]]:
        """Return what must not be drawn now: ends before `min_tokens`, and last tokens of bad words."""
        held_back = rows.held_back
        waiting = held_back[self._params.stops_from[slots[held_back]] > positions[held_back]]
        forbidden = {row: self._params.stop_ids[slots[row]] for row in waiting.tolist()}
        for row in rows.worded.tolist():
            banned = self._completing(slots[row], int(positions[row]))
            if banned:
                forbidden[row] = (*forbidden.get(row, ()), *banned)
        return forbidden

    def _completing(self, slot: int, position: int) -> list[int]:
        """Return the tokens that would complete a bad word at `position`; only output counts as its beginning."""
        tables, words = self._tables, self._params.rules[slot].bad_words
        longest = max(map(len, words)) - 1
        start = max(int(tables.num_prompt[slot]), position - longest)
        tail = tables.tokens[slot, start:position].tolist()
        return [word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == list(word[:-1])]

    def _history(self, rows: Index, slots: Index, of_prompt: bool) -> Ints:
        """Return prompt or output ids of the penalised rows, -1 elsewhere. [num_samples, longest]."""
        tables, chosen = self._tables, slots[rows]
        starts = tables.num_prompt[chosen]
        lens = starts if of_prompt else tables.num_tokens[chosen] - starts
        first = chosen * tables.context_len + (0 if of_prompt else starts)
        columns = np.arange(int(lens.max()))
        inside = columns < lens[:, None]  # [penalised rows, longest]
        found = tables.flat_tokens.take(np.where(inside, first[:, None] + columns, 0))
        history = np.full((len(slots), len(columns)), -1, np.int32)
        history[rows] = np.where(inside, found, -1)
        return history
