"""From a schedule to the arrays that a model needs: vectorised over tokens, one pass, no loop over sequences.

Token level and request level follow the vllm-ascend developer guide on input preparation; the worked example of
DESIGN section 7 is a test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.grammar.masks import MaskMaker
from engine.report import NO_PAIRS, Ints, PromptScores, SamplingInputs, StepInputs
from engine.sampling.parameter_table import SamplingBuilder, SamplingTable
from engine.scheduler.schedule import Index, Schedule
from engine.scheduler.tables import Tables


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
        self, tables: Tables, params: SamplingTable, masks: MaskMaker, block_size: int, max_tokens: int
    ) -> None:
        """block_size: a power of two. max_tokens: most tokens of one step."""
        self._tables = tables
        self._sampling = SamplingBuilder(tables, params, masks)
        self._shift = block_size.bit_length() - 1
        self._mask = block_size - 1
        self._counting: Ints = np.arange(max(max_tokens, tables.num_slots) + 1, dtype=np.int32)
        self._buffers = _TokenBuffers(max_tokens)
        self._block_rows: Ints = np.zeros((0, 0), np.int32)
        self._version = 0

    def prepare(self, schedule: Schedule) -> tuple[StepInputs, SamplingInputs]:
        """Return what the ranks compute and how rank 0 samples."""
        query_start_loc = self._query_start_loc(schedule)
        tokens = self.token_level(schedule, query_start_loc)
        inputs = StepInputs(
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            slot_mapping=tokens.slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=schedule.seq_lens,
            num_computed_tokens=schedule.num_computed,
            block_tables=self._block_tables(schedule),
            logits_indices=self._logits_indices(schedule, query_start_loc),
            copy_blocks=np.array(schedule.copies, np.int32) if schedule.copies else NO_PAIRS,
            carried=_carried(schedule, query_start_loc),
            slots=schedule.slots.astype(np.int32),
        )
        sampling = self._sampling.build(schedule)
        if schedule.scores or schedule.pooled:
            self._read_prompts(schedule, inputs, sampling)
        return inputs, sampling

    def _read_prompts(self, schedule: Schedule, inputs: StepInputs, sampling: SamplingInputs) -> None:
        """Add the rows whose logits tell of prompt tokens, and those whose hidden states are pooled."""
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
        np.multiply(request_indices, tables.context_len, out=out.token_indices)
        np.add(out.token_indices, positions, out=out.token_indices)
        tables.flat_tokens.take(out.token_indices, out=out.input_ids, mode="clip")
        np.right_shift(positions, self._shift, out=out.offsets)
        np.multiply(request_indices, tables.blocks.shape[1], out=out.block_table_indices)
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

    def _block_tables(self, schedule: Schedule) -> Ints:
        """Return the block-table rows, as wide as the longest; only rows that changed are read again."""
        width = (int(schedule.seq_lens.max()) + self._mask) >> self._shift
        rows = self._block_rows
        if not schedule.version or schedule.version != self._version or rows.shape[1] != width:
            self._block_rows = self._tables.blocks[:, :width].take(schedule.slots, axis=0)
            self._version = schedule.version
        elif schedule.changed_rows is not None:
            rows[schedule.changed_rows] = self._tables.blocks[schedule.slots[schedule.changed_rows], :width]
        return self._block_rows


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


def attention_mask(inputs: StepInputs) -> NDArray[np.bool_]:
    """Return which keys (columns) each query (row) may see, for backends that cannot derive it themselves.

    In a step of whole prompts, one causal square of the longest query is shared by all requests
    [max_query_len, max_query_len]; else there is a row per token [num_tokens, max_seq_len].
    """
    if not inputs.num_computed_tokens.any():
        return np.tri(inputs.max_query_len, dtype=np.bool_)
    return np.arange(inputs.max_seq_len) <= inputs.positions[:, None]
