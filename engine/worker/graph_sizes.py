"""Which steps are replayed from CUDA graphs: the padded sizes, and which of them a step takes.

Needs no torch: every rank comes to the same answers from the config and the steps alone.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from engine.config import EngineConfig
from engine.report import StepInputs

MOST_ROWS = 512  # a step of more sequences is long enough for its launches to be hidden behind it
FINE, COARSE = 8, 16  # distance of sizes: up to 256, and beyond
COARSE_FROM = 256
MIXED = (64, 128, 256, 512)  # tokens; a step of more is long enough for its launches to be hidden behind it
AT_START = 64  # distance of the sizes beyond 64 that a start waits for; those below it double


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Padded batch sizes, ascending. at_start: those of them that are captured before the first request, likewise."""

    sizes: tuple[int, ...] = ()
    at_start: tuple[int, ...] = ()

    @property
    def largest(self) -> int:
        """Most sequences of a step that is replayed; 0 = none is."""
        return self.sizes[-1] if self.sizes else 0

    def fit(self, rows: int) -> int | None:
        """Return the least size that holds so many sequences, None where there is none."""
        return least(self.sizes, rows)


NO_SIZES = GraphSizes()


def graph_sizes(config: EngineConfig) -> GraphSizes:
    """Return the sizes for an engine: those of the config, or 1, 2, 4, 8, 16, 24, ... up to the most sequences."""
    if config.enforce_eager:
        return NO_SIZES
    given = config.cudagraph_capture_sizes
    if given is not None:
        return GraphSizes(given, given)
    limit = min(config.max_num_seqs, config.token_budget)
    most = min(limit, MOST_ROWS)
    steps = (1, 2, 4, *range(FINE, COARSE_FROM, FINE), *range(COARSE_FROM, MOST_ROWS + 1, COARSE))
    sizes = (*(size for size in steps if size < most), most)
    return GraphSizes(sizes, tuple(size for size in sizes if _at_start(size) or size == most))


def mixed_sizes(config: EngineConfig) -> GraphSizes:
    """Return the numbers of tokens that steps with prompts are padded to; none beside sizes that are given."""
    if config.enforce_eager or config.cudagraph_capture_sizes is not None:
        return NO_SIZES
    sizes = tuple(size for size in MIXED if size <= config.token_budget)
    return GraphSizes(sizes, sizes)


def decode_rows(inputs: StepInputs) -> int | None:
    """Return the sequences of a step in which each computes one token and wants its logits, None for another step."""
    rows, wanted = inputs.num_reqs, inputs.logits_indices
    if not rows == inputs.num_tokens == len(wanted):
        return None
    # As many logits may also be siblings', drawn from one row, beside rows that want none.
    return rows if (np.diff(wanted) > 0).all() else None


def least(sizes: tuple[int, ...], rows: int) -> int | None:
    """Return the least of ascending `sizes` that is at least `rows`, None where all are less."""
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else None


def _at_start(size: int) -> bool:
    return size & (size - 1) == 0 if size <= AT_START else size % AT_START == 0
