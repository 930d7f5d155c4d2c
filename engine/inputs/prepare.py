"""From a schedule to the arrays that a model and its sampler need: vectorised over tokens, no loop over sequences.

Token level and request level follow the vllm-ascend developer guide on input preparation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.inputs.block_table import BlockRows
from engine.inputs.grammar_masks import MaskMaker
from engine.report import (
    NO_DRAWS,
    NO_ENDINGS,
    NO_PAIRS,
    NO_STATES,
    Histories,
    Ints,
    PromptScores,
    SamplingInputs,
    StepInputs,
)
from engine.sampling.parameter_table import NO_LOGPROBS, SamplingTable
from engine.scheduler.schedule import ONE, Continued, Index, Schedule
from engine.scheduler.slots import SlotTables


@dataclass(slots=True)
class _SampledRows:
    """What stays the same while the sampled sequences do."""

    version: int
    inputs: SamplingInputs
    starts: Ints  # of the outputs, [num_samples]
    asks_history: bool
    held_back: Index  # rows with a minimum of tokens
    worded: Index  # rows with bad words of more than two tokens
    structured: list[int]  # rows with a grammar
    banned: dict[int, Ints | tuple[int, ...]]  # by row, whatever has been drawn
    waiting: list[int]  # rows whose ends are forbidden beside those


class SamplingBuilder:
    """Makes `SamplingInputs`. The arrays of one call are overwritten by the next."""

    def __init__(self, tables: SlotTables, params: SamplingTable, masks: MaskMaker) -> None:
        self._tables = tables
        self._params = params
        self._masks = masks
        self._rows: _SampledRows | None = None

    def build(self, schedule: Schedule) -> SamplingInputs:
        """Return the parameters of the sequences that draw, and what their draws depend on beside the logits."""
        rows = self._rows
        if rows is None or not schedule.version or rows.version != schedule.version:
            rows = self._rows = self._gather(schedule)
        inputs, slots = rows.inputs, schedule.sample_slots
        inputs.positions = schedule.seq_lens if schedule.decode else schedule.seq_lens[schedule.sample_rows]
        if rows.held_back.size:
            self._hold_back(rows, slots)
        if rows.asks_history:
            inputs.histories = Histories(schedule.sample_rows.astype(np.int32), rows.starts, inputs.positions)
        if rows.worded.size:
            inputs.endings = self._endings(rows, slots)
        if rows.structured:
            samples = [schedule.samples[row] for row in rows.structured]
            inputs.masks = self._masks.start(rows.structured, samples, _drawn_now(schedule)[rows.structured].tolist())
        return inputs

    def _gather(self, schedule: Schedule) -> _SampledRows:
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
            whole_rows=table.whole_rows[slots].nonzero()[0],
        )
        rules = [(row, table.rules[slots[row]]) for row in table.ruled[slots].nonzero()[0].tolist()]
        inputs.biases = {row: rule.biases for row, rule in rules if rule.biases is not None}
        inputs.allowed = {row: rule.allowed for row, rule in rules if rule.allowed is not None}
        inputs.pairs = {row: rule.pairs for row, rule in rules if rule.pairs is not None}
        inputs.forbidden = banned = {row: rule.banned for row, rule in rules if rule.banned is not None}
        worded = np.array([row for row, rule in rules if rule.longer], np.intp)
        return _SampledRows(
            schedule.version,
            inputs,
            starts=self._tables.num_prompt[slots],
            asks_history=bool(table.penalised[slots].any() or inputs.pairs or worded.size),
            held_back=(table.stops_from[slots] > inputs.positions).nonzero()[0],
            worded=worded,
            structured=table.structured[slots].nonzero()[0].tolist(),
            banned=banned,
            waiting=[],
        )

    def _hold_back(self, rows: _SampledRows, slots: Index) -> None:
        """Forbid the ends that must not be drawn before `min_tokens`."""
        late = self._params.stops_from[slots[rows.held_back]] > rows.inputs.positions[rows.held_back]
        waiting = rows.held_back[late].tolist()
        if waiting != rows.waiting:
            stops = {row: self._params.stop_ids[slots[row]] for row in waiting}
            both = {row: np.array([*stops[row], *rows.banned[row]], np.int32) for row in stops if row in rows.banned}
            rows.inputs.forbidden, rows.waiting = rows.banned | stops | both, waiting

    def _endings(self, rows: _SampledRows, slots: Index) -> Ints:
        """Return the last two tokens of bad words all of whose others are there: (row, the last but one, the last).

        They are found by the token before these two; the last but one may be known to the device alone. Only output
        counts as the beginning of a word.
        """
        tables, slots = self._tables, slots[rows.worded]
        positions = rows.inputs.positions[rows.worded]
        before = tables.tokens[slots, positions - 2].tolist()
        found: list[tuple[int, ...]] = []
        for row, slot, position, token in zip(rows.worded.tolist(), slots, positions.tolist(), before, strict=True):
            output = position - int(rows.starts[row])
            for word in self._params.rules[slot].longer.get(token, ()):
                begun = tuple(tables.tokens[slot, position + 1 - len(word) : position - 1].tolist())
                if output >= len(word) - 1 and begun == word[:-2]:
                    found.append((row, *word[-2:]))
        return np.array(found, np.int32) if found else NO_ENDINGS


def _drawn_now(schedule: Schedule) -> Index:
    """Return the sample of the step before that draws each row's last token; -1 where it is known. [num_samples]."""
    drawn = np.full(len(schedule.sequences), -1, np.intp)
    if schedule.carried is not None:
        rows, samples = schedule.carried.T
        drawn[rows] = samples
    return drawn[schedule.sample_rows]


@dataclass(slots=True)
class TokenLevel:
    """Where each token of a step comes from and where its K/V go. [num_tokens] each.

    request_indices: row of the tables. token_indices: into the flat token table (request x M + position).
    block_table_indices: into the flat block table (request x K + position // block_size).
    slot_mapping: block number x block_size + offset.
    """

    request_indices: Index
    positions: Ints
    token_indices: Index
    input_ids: Ints
    block_table_indices: Index
    block_numbers: Ints
    offsets: Ints
    slot_mapping: Ints


class InputBuilder:
    """Turns schedules into `StepInputs` and `SamplingInputs`.

    The arrays that a call returns belong to the builder, and the next call overwrites them: executors have copied
    what they need of them when `Executor.launch` returns.
    """

    def __init__(
        self, tables: SlotTables, params: SamplingTable, masks: MaskMaker, block_size: int, max_tokens: int
    ) -> None:
        """block_size: a power of two. max_tokens: most tokens of one step."""
        self._tables = tables
        self._sampling = SamplingBuilder(tables, params, masks)
        self._shift = block_size.bit_length() - 1
        self._mask = block_size - 1
        self._block_size: Ints = np.array([block_size], np.int32)  # [1]: arrays multiply faster than numbers
        self._counting: Ints = np.arange(max(max_tokens, tables.num_slots) + 1, dtype=np.int32)
        self._buffers = _TokenBuffers(max_tokens)
        self._block_rows = BlockRows(tables)
        self._before: StepInputs | None = None  # what was prepared last

    def prepare(self, schedule: Schedule) -> tuple[StepInputs, SamplingInputs]:
        """Return what the ranks compute and how rank 0 samples."""
        before, self._before = self._before, None
        if before is not None and schedule.continued is not None and schedule.num_computed is before.seq_lens:
            inputs = self._continue(schedule, schedule.continued, before)
        else:
            inputs = self._begin(schedule)
        if schedule.states is not None:
            inputs.state_sources = schedule.states.sources
            inputs.state_copies = np.array(schedule.states.copies, np.int32).reshape(-1, 2)
        sampling = self._sampling.build(schedule)
        if schedule.scores or schedule.pooled:
            self._read_prompts(schedule, inputs, sampling)
        self._before = inputs
        return inputs, sampling

    def _begin(self, schedule: Schedule) -> StepInputs:
        """Return the inputs of any step."""
        query_start_loc = self._query_start_loc(schedule)
        tokens = self.token_level(schedule, query_start_loc)
        return StepInputs(
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            slot_mapping=tokens.slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=schedule.seq_lens,
            num_computed_tokens=schedule.num_computed,
            block_tables=self._block_rows.read(schedule),
            logits_indices=self._logits_indices(schedule, query_start_loc),
            copy_blocks=np.array(schedule.copies, np.int32) if schedule.copies else NO_PAIRS,
            carried=_carried(schedule, query_start_loc),
            slots=schedule.slots.astype(np.int32),
        )

    def _continue(self, schedule: Schedule, continued: Continued, before: StepInputs) -> StepInputs:
        """Return the inputs of a step that moves the rows of `before`, which was prepared last, on by one token."""
        slot_mapping, grown = before.slot_mapping + ONE, continued.grown
        if grown.sequences:
            slot_mapping[grown.rows] = continued.new_blocks * self._block_size
        return StepInputs(
            self._tables.flat_tokens[continued.token_places],
            schedule.num_computed,
            slot_mapping,
            before.query_start_loc,
            schedule.seq_lens,
            schedule.num_computed,
            self._block_rows.append(schedule, continued),
            before.logits_indices,
            NO_PAIRS,
            NO_PAIRS,
            NO_DRAWS,
            NO_PAIRS if schedule.carried is None else schedule.carried,
            before.slots,
            NO_STATES,
            NO_PAIRS,
        )

    def _read_prompts(self, schedule: Schedule, inputs: StepInputs, sampling: SamplingInputs) -> None:
        """Add the rows whose logits are of prompt tokens, and those whose hidden states are pooled."""
        starts, samples = inputs.query_start_loc, inputs.logits_indices
        row_of = {sequence: row for row, sequence in enumerate(schedule.sequences)}
        if schedule.scores:
            spans = [
                np.arange(first, beyond) + (starts[row_of[sequence]] - schedule.num_computed[row_of[sequence]])
                for sequence, first, beyond in schedule.scores
            ]
            targets = [s.request.prompt_token_ids[first + 1 : beyond + 1] for s, first, beyond in schedule.scores]
            scored = np.concatenate(spans).astype(np.int32)
            inputs.logits_indices = wanted = np.unique(np.concatenate([samples, scored]))
            sampling.rows = np.searchsorted(wanted, samples).astype(np.int32)
            sampling.prompt = PromptScores(
                np.searchsorted(wanted, scored).astype(np.int32),
                np.concatenate([np.array(ids, np.int32) for ids in targets]),
                max(sequence.request.params.prompt_logprobs or 0 for sequence, _, _ in schedule.scores),
            )
        if schedule.pooled:
            means = [sequence.request.pooling == "mean" for sequence, _ in schedule.pooled]
            rows = np.array([row for _, row in schedule.pooled])
            beyond = starts[rows + 1]
            inputs.pooled = np.stack([np.where(means, starts[rows], beyond - 1), beyond], axis=1).astype(np.int32)

    def token_level(self, schedule: Schedule, query_start_loc: Ints) -> TokenLevel:
        """Derive everything that has one entry per token. A decode step needs no repeating of rows."""
        if schedule.decode:
            return self._locate(schedule.slots, schedule.num_computed)
        lens = schedule.query_lens
        request_indices = np.repeat(schedule.slots, lens)
        first = schedule.num_computed - query_start_loc[:-1]
        positions = np.repeat(first, lens) + self._counting[: schedule.num_tokens]
        return self._locate(request_indices, positions)

    def _locate(self, request_indices: Index, positions: Ints) -> TokenLevel:
        tables = self._tables
        out = self._buffers.views(len(positions))
        np.copyto(out.positions, positions)
        np.multiply(request_indices, tables.tokens_per_slot, out=out.token_indices)
        np.add(out.token_indices, positions, out=out.token_indices)
        tables.flat_tokens.take(out.token_indices, out=out.input_ids, mode="clip")
        np.right_shift(positions, self._shift, out=out.offsets)
        np.multiply(request_indices, tables.blocks_per_slot, out=out.block_table_indices)
        np.add(out.block_table_indices, out.offsets, out=out.block_table_indices)
        tables.flat_blocks.take(out.block_table_indices, out=out.block_numbers, mode="clip")
        np.bitwise_and(positions, self._mask, out=out.offsets)
        np.left_shift(out.block_numbers, self._shift, out=out.slot_mapping)
        np.add(out.slot_mapping, out.offsets, out=out.slot_mapping)
        out.request_indices = request_indices
        return out

    def _query_start_loc(self, schedule: Schedule) -> Ints:
        if schedule.decode:
            return self._counting[: len(schedule.slots) + 1]
        starts: Ints = np.zeros(len(schedule.slots) + 1, np.int32)
        np.cumsum(schedule.query_lens, out=starts[1:])
        return starts

    def _logits_indices(self, schedule: Schedule, query_start_loc: Ints) -> Ints:
        if schedule.decode:
            return self._counting[: len(schedule.slots)]
        return query_start_loc[schedule.sample_rows + 1] - 1


class _TokenBuffers:
    """The memory behind `TokenLevel`, allocated once and cut to the step's length."""

    def __init__(self, max_tokens: int) -> None:
        self._indices: Index = np.zeros((2, max_tokens), np.intp)
        self._values: Ints = np.zeros((5, max_tokens), np.int32)
        self._views: TokenLevel | None = None

    def views(self, count: int) -> TokenLevel:
        """Return arrays of `count` tokens; the same ones again when the count is that of the last call."""
        if self._views is None or len(self._views.positions) != count:
            token_indices, block_table_indices = self._indices[:, :count]
            positions, input_ids, numbers, offsets, slots = self._values[:, :count]
            self._views = TokenLevel(
                token_indices, positions, token_indices, input_ids, block_table_indices, numbers, offsets, slots
            )
        return self._views


def _carried(schedule: Schedule, query_start_loc: Ints) -> Ints:
    """Return the rows of `input_ids` that the step before fills in, each its request's only one."""
    if schedule.carried is None:
        return NO_PAIRS
    if schedule.decode:
        return schedule.carried
    rows, samples = schedule.carried.T
    return np.stack([query_start_loc[rows], samples], axis=1)
