"""Steps for tests of attention. Needs no more than a bare GPU machine has: tests/gpu uses it too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.report import StepInputs

BLOCK = 4
NUM_BLOCKS = 400


def make_step(computed, lengths, seed=0, block=BLOCK, num_blocks=NUM_BLOCKS) -> StepInputs:
    """Lay sequences out in scattered blocks of `block` tokens; returns the step, as the runner gets it."""
    free = (np.random.default_rng(seed).permutation(num_blocks - 1) + 1).tolist()
    ends = [c + n for c, n in zip(computed, lengths, strict=True)]
    widest = max(-(-end // block) for end in ends)
    tables = np.zeros((len(ends), widest), np.int32)
    positions, slots = [], []
    for row, (first, end) in enumerate(zip(computed, ends, strict=True)):
        used = -(-end // block)
        tables[row, :used] = [free.pop() for _ in range(used)]
        where = np.arange(first, end)
        positions.append(where)
        slots.append(tables[row, where // block] * block + where % block)
    positions = np.concatenate(positions).astype(np.int32)
    return StepInputs(
        input_ids=np.zeros_like(positions),
        positions=positions,
        slot_mapping=np.concatenate(slots).astype(np.int32),
        query_start_loc=np.cumsum([0, *lengths]).astype(np.int32),
        seq_lens=np.array(ends, np.int32),
        num_computed_tokens=np.array(computed, np.int32),
        block_tables=tables,
        logits_indices=np.empty(0, np.int32),
        copy_blocks=np.empty((0, 2), np.int32),
    )


def step_on(blocks, counts, starts, block) -> StepInputs:
    """Return the step of `counts` tokens of each sequence from `starts` on; blocks: those of each, as many of all."""
    tables = np.array(blocks, np.int32)
    where = [np.arange(first, first + count) for first, count in zip(starts, counts, strict=True)]
    slots = [tables[row, at // block] * block + at % block for row, at in enumerate(where)]
    return replace(
        make_step([0] * len(counts), counts),
        slot_mapping=np.concatenate(slots).astype(np.int32),
        seq_lens=np.array([at[-1] + 1 for at in where], np.int32),
        num_computed_tokens=np.array(starts, np.int32),
        block_tables=tables,
    )
