"""Steps without requests: to warm up, and to measure the memory that the largest step takes."""

from __future__ import annotations

import numpy as np

from engine.report import Histories, PromptScores, SamplingInputs, StepInputs
from engine.sampling_params import MAX_LOGPROBS


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
    sampling.histories = Histories(np.arange(count, dtype=np.int32), np.zeros(count, np.int32), step.seq_lens)
    sampling.masks = lambda: (np.zeros(1, np.int32), np.full((1, -(-vocab // 32)), -1, np.int32))
    rows = np.flatnonzero(wanted >= first).astype(np.int32)
    sampling.prompt = PromptScores(rows, np.zeros(len(rows), np.int32), MAX_LOGPROBS)
    return sampling
