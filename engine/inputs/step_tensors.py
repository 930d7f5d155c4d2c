"""From a step's numpy arrays to tensors on the device, in one copy; what was drawn stays there for the next step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepLayout, StepTensors
from engine.device.gpu import upload
from engine.report import Ints, PromptScores, SamplingInputs, StepInputs
from engine.sampling_params import MAX_LOGPROBS
from parallel.group import Group


def to_device(inputs: StepInputs, device: torch.device) -> tuple[StepTensors, Tensor]:
    """Return the step on the device, and its block copies, [num_copies, 2].

    The tensors share one buffer that is this step's own, so the arrays of `inputs` may be reused or read-only. Waits
    for a GPU, whose engine has `engine.inputs.step_buffers` instead.
    """
    arrays = (
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_tables,
        inputs.logits_indices,
        inputs.copy_blocks,
    )
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    flat = packed.split([array.size for array in arrays])
    ids, positions, slots, starts, lens, tables, logits, copies = flat
    layout = StepLayout(
        inputs.slot_mapping, inputs.query_start_loc, inputs.seq_lens, inputs.num_computed_tokens, inputs.block_tables
    )
    tables = tables.view(inputs.block_tables.shape)
    return StepTensors(layout, ids, positions, slots.long(), starts, lens, tables, logits), copies.view(-1, 2)


def split_step(inputs: StepInputs, most: int) -> list[StepInputs]:
    """Cut a step into parts of about one size and at most `most` tokens, to be run one after another.

    A sequence that is cut continues in the next part as a chunked prompt does. Block copies stay with the first part.
    Every part has a share of all that is pooled, most of them an empty one.
    """
    count = -(-inputs.num_tokens // most)
    if count <= 1:
        return [inputs]
    bounds = np.linspace(0, inputs.num_tokens, count + 1).astype(np.int32).tolist()
    return [_part(inputs, start, end) for start, end in pairwise(bounds)]


def _part(inputs: StepInputs, start: int, end: int) -> StepInputs:
    """Return the step of the tokens [start, end) alone."""
    first = inputs.query_start_loc[:-1].clip(start, end)
    last = inputs.query_start_loc[1:].clip(start, end)
    rows = np.flatnonzero(last > first)
    first, last = first[rows], last[rows]
    computed = inputs.num_computed_tokens[rows] + first - inputs.query_start_loc[rows]
    wanted, carried = inputs.logits_indices, inputs.carried
    mine = carried[(carried[:, 0] >= start) & (carried[:, 0] < end)]
    return StepInputs(
        input_ids=inputs.input_ids[start:end],
        positions=inputs.positions[start:end],
        slot_mapping=inputs.slot_mapping[start:end],
        query_start_loc=np.append(first, end).astype(np.int32) - np.int32(start),
        seq_lens=computed + last - first,
        num_computed_tokens=computed,
        block_tables=inputs.block_tables[rows],
        logits_indices=wanted[(wanted >= start) & (wanted < end)] - np.int32(start),
        copy_blocks=inputs.copy_blocks if start == 0 else inputs.copy_blocks[:0],
        pooled=inputs.pooled.clip(start, end) - np.int32(start),
        carried=mine - np.array([start, 0], np.int32),
        slots=inputs.slots[rows] if len(inputs.slots) else inputs.slots,
    )


def dummy_step(num_tokens: int, num_seqs: int, longest: int, block_size: int) -> StepInputs:
    """Return a step of fresh prompts that all live in the null block, for warming up and measuring memory.

    num_tokens are shared by at least `num_seqs` sequences of at most `longest` tokens.
    """
    num_seqs = min(max(num_seqs, -(-num_tokens // longest)), num_tokens)
    starts = np.linspace(0, num_tokens, num_seqs + 1).astype(np.int32)
    lens = np.diff(starts)
    positions = (np.arange(num_tokens) - np.repeat(starts[:-1], lens)).astype(np.int32)
    return StepInputs(
        input_ids=np.zeros(num_tokens, np.int32),
        positions=positions,
        slot_mapping=positions % block_size,
        query_start_loc=starts,
        seq_lens=lens,
        num_computed_tokens=np.zeros(num_seqs, np.int32),
        block_tables=np.zeros((num_seqs, -(-int(lens.max()) // block_size)), np.int32),
        logits_indices=starts[1:] - 1,
        copy_blocks=np.empty((0, 2), np.int32),
    )


def dummy_decode(length: int, block_size: int) -> StepInputs:
    """Return a step of the last token of a sequence of `length`, all in the null block.

    Its logits are not wanted, so that it runs as tokens do that are generated beside prompts, not from a graph.
    """
    step = dummy_step(1, 1, 1, block_size)
    step.positions = np.full(1, length - 1, np.int32)
    step.slot_mapping = step.positions % block_size
    step.seq_lens = np.full(1, length, np.int32)
    step.num_computed_tokens = step.positions
    step.block_tables = np.zeros((1, -(-length // block_size)), np.int32)
    step.logits_indices = step.logits_indices[:0]
    return step


def dummy_sampling(num_samples: int) -> SamplingInputs:
    """Return seeded sampling with a filter for every row, to warm up what a step may need."""
    ones, zeros = np.ones(num_samples, np.float32), np.zeros(num_samples, np.float32)
    nothing = np.zeros(num_samples, np.int32)
    return SamplingInputs(
        temperature=ones,
        top_k=nothing,
        top_p=ones * np.float32(0.9),
        min_p=zeros,
        seeds=np.zeros(num_samples, np.int64),
        choices=nothing,
        positions=nothing,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
    )


def fullest_sampling(step: StepInputs, scored: int, vocab: int) -> SamplingInputs:
    """Let a step also give the log-probabilities of `scored` prompt tokens, if it has as many; return its sampling.

    Every row that draws has a filter, penalties and log-probabilities, the first a mask. The scored tokens are the
    last ones, beside which the logits of all others are kept: nothing takes more memory.
    """
    drawn = step.logits_indices
    count, first = len(drawn), max(step.num_tokens - scored, 0)
    step.logits_indices = wanted = np.union1d(drawn, np.arange(first, step.num_tokens, dtype=np.int32))
    sampling = dummy_sampling(count)
    sampling.rows = np.searchsorted(wanted, drawn).astype(np.int32)
    sampling.num_logprobs = MAX_LOGPROBS
    sampling.repetition_penalty = np.full(count, 1.1, np.float32)
    sampling.prompt_ids = sampling.output_ids = np.zeros((count, 1), np.int32)
    sampling.masks = lambda: (np.zeros(1, np.int32), np.full((1, -(-vocab // 32)), -1, np.int32))
    rows = np.flatnonzero(wanted >= first).astype(np.int32)
    sampling.prompt = PromptScores(rows, np.zeros(len(rows), np.int32), MAX_LOGPROBS)
    return sampling


class TokenFeedback:
    """The tokens that the last step drew. All ranks must `fill` alike: rank 0, which draws, tells the others."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._drawn: Tensor | None = None

    @property
    def drawn(self) -> Tensor | None:
        """What the last step drew, on rank 0; None before the first."""
        return self._drawn

    def keep(self, token_ids: Tensor) -> None:
        """Remember what a step drew, [num_samples] int32; negative where it has no token. On rank 0."""
        self._drawn = token_ids

    def fill(self, input_ids: Tensor, carried: Ints) -> None:
        """Write the tokens of the last step into `input_ids`, [num_tokens] int32. carried: `StepInputs.carried`."""
        count = len(carried)
        if not count:
            return
        in_order = bool((carried == np.arange(count)[:, None]).all())  # a decode step after another
        pairs = None if in_order else upload([carried.T.astype(np.int64)], input_ids.device)[0]
        if self._drawn is None:
            ids = torch.empty(count, dtype=torch.int32, device=input_ids.device)
        else:
            ids = self._drawn[:count] if pairs is None else self._drawn.index_select(0, pairs[1])
            ids = ids.clamp(min=0)  # whoever has no token wants none of this step
        ids = self._group.broadcast(ids)
        if pairs is None:
            input_ids[:count] = ids
        else:
            input_ids.index_copy_(0, pairs[0], ids)
