"""Cuts the queries of a step into tiles for kernels that take a few of one sequence at a time."""

from __future__ import annotations

import numpy as np

from engine.attention.base import Ints, StepLayout


def cut(layout: StepLayout, size: int) -> Ints:
    """Return the tiles of a step, [num_tiles, 3]: row in the tables, first query, queries (at most `size`)."""
    lengths = np.diff(layout.query_start_loc)
    parts = -(-lengths // size)
    sequence = np.repeat(np.arange(len(lengths)), parts)
    offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(parts) - parts, parts)) * size
    count = np.minimum(lengths[sequence] - offset, size)
    return np.stack((sequence, offset, count), axis=1).astype(np.int32)
