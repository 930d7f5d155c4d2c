"""Sampling parameters by slot, written once at admission, and the rows of them that a step needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.grammar.masks import MaskMaker
from engine.report import NO_ENDINGS, NO_PAIRS, Floats, Ints, SamplingInputs
from engine.request import Sequence
from engine.sampling_params import SamplingParams
from engine.scheduler.schedule import Index, Schedule
from engine.scheduler.tables import Tables

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
        self.penalised[slot] = self._changes_logits(slot)
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.stops_from[slot] = sequence.num_prompt_tokens + params.min_tokens if stop_ids else 0
        self.stop_ids[slot] = stop_ids
        self.rules[slot] = rules = Rules.of(params)
        self.ruled[slot] = rules is not NO_RULES
        self.structured[slot] = sequence.grammar is not None

    def _changes_logits(self, slot: int) -> bool:
        """Whether a slot has a penalty. Asked of what fp32 kept: a penalty of 1e-50 is none."""
        added = self.presence_penalty[slot] or self.frequency_penalty[slot]
        return bool(self.repetition_penalty[slot] != 1 or added)


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
        inputs, slots = rows.inputs, schedule.sample_slots
        inputs.positions = schedule.seq_lens if schedule.decode else schedule.seq_lens[schedule.sample_rows]
        if rows.held_back.size:
            inputs.forbidden = self._held_back(rows.held_back, slots, inputs.positions)
        if rows.worded.size or rows.structured or rows.penalised.size:
            self._look_back(rows, schedule, _drawn_now(schedule))
        return inputs

    def _look_back(self, rows: _Rows, schedule: Schedule, drawn_now: Index) -> None:
        """Fill in what depends on the output so far, and how it does on a last token that only the device knows.

        drawn_now: the sample of the step before that draws each row's last token; -1 where that is known.
        """
        inputs, slots = rows.inputs, schedule.sample_slots
        if rows.worded.size:
            if not rows.held_back.size:
                inputs.forbidden = {}
            self._forbid_words(rows, slots, drawn_now)
        if rows.penalised.size:
            unknown = drawn_now[rows.penalised] >= 0
            inputs.carried = _pairs(rows.penalised[unknown], drawn_now)
            starts = self._tables.num_prompt[slots[rows.penalised]]
            lens = self._tables.num_tokens[slots[rows.penalised]] - starts - unknown
            inputs.output_ids = self._history(rows.penalised, slots, starts, lens)
        if rows.structured:
            samples = [schedule.samples[row] for row in rows.structured]
            inputs.masks = self._masks.start(rows.structured, samples, drawn_now[rows.structured].tolist())

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
            lens = self._tables.num_prompt[slots[penalised]]
            inputs.prompt_ids = self._history(penalised, slots, np.zeros_like(lens), lens)
        rules = [(row, table.rules[slots[row]]) for row in table.ruled[slots].nonzero()[0].tolist()]
        inputs.biases = {row: rule.biases for row, rule in rules if rule.biases is not None}
        inputs.allowed = {row: rule.allowed for row, rule in rules if rule.allowed is not None}
        worded = np.array([row for row, rule in rules if rule.bad_words], np.intp)
        structured = table.structured[slots].nonzero()[0].tolist()
        return _Rows(schedule.version, inputs, penalised, held_back, worded, structured)

    def _held_back(self, held_back: Index, slots: Index, positions: Ints) -> dict[int, tuple[int, ...]]:
        """Return the ends that must not be drawn before `min_tokens`."""
        waiting = held_back[self._params.stops_from[slots[held_back]] > positions[held_back]]
        return {row: self._params.stop_ids[slots[row]] for row in waiting.tolist()}

    def _forbid_words(self, rows: _Rows, slots: Index, drawn_now: Index) -> None:
        """Forbid the last tokens of bad words, some of them only after what the device knows alone."""
        inputs = rows.inputs
        forbidden, endings = dict(inputs.forbidden), []
        for row in rows.worded.tolist():
            sample = int(drawn_now[row])
            banned, ends = self._completing(slots[row], int(inputs.positions[row]), sample >= 0)
            if banned:
                forbidden[row] = (*forbidden.get(row, ()), *banned)
            endings += [(row, sample, *end) for end in ends]
        inputs.forbidden = forbidden
        inputs.endings = np.array(endings, np.int32) if endings else NO_ENDINGS

    def _completing(self, slot: int, position: int, late: bool) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return the tokens that would complete a bad word at `position`, and those that would after another one.

        late: the last token is not known here; then the latter are told with the token that it would have to be.
        Only output counts as the beginning of a word.
        """
        tables, words = self._tables, self._params.rules[slot].bad_words
        longest = max(map(len, words)) - 1
        start, end = max(int(tables.num_prompt[slot]), position - longest), position - late
        tail = tuple(tables.tokens[slot, start:end].tolist())
        if late:
            banned = [word[-1] for word in words if len(word) == 1]
            longer = [word for word in words if len(word) > 1]
            return banned, [word[-2:] for word in longer if len(word) == 2 or tail[2 - len(word) :] == word[:-2]]
        return [word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]], []

    def _history(self, rows: Index, slots: Index, starts: Ints, lens: Ints) -> Ints:
        """Return ids of the penalised rows, -1 elsewhere. [num_samples, longest].

        starts, lens: the first position and the number of ids of each of `rows`.
        """
        columns = np.arange(int(lens.max()))
        first = slots[rows] * self._tables.context_len + starts
        # What is read past the end of a row's ids is overwritten.
        found = self._tables.flat_tokens.take(first[:, None] + columns, mode="clip")
        np.copyto(found, -1, where=columns >= lens[:, None])
        if len(rows) == len(slots):
            return found
        history = np.full((len(slots), len(columns)), -1, np.int32)
        history[rows] = found
        return history


def _pairs(rows: Index, drawn_now: Index) -> Ints:
    """Return each of `rows` with the sample that draws its last token, [num_rows, 2]."""
    if not rows.size:
        return NO_PAIRS
    pairs = np.empty((len(rows), 2), np.int32)
    pairs[:, 0], pairs[:, 1] = rows, drawn_now[rows]
    return pairs


def _drawn_now(schedule: Schedule) -> Index:
    """Return the sample of the step before that draws each row's last token; -1 where it is known. [num_samples]."""
    drawn = np.full(len(schedule.sequences), -1, np.intp)
    if schedule.carried is not None:
        rows, samples = schedule.carried.T
        drawn[rows] = samples
    return drawn[schedule.sample_rows]
