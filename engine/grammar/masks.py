"""The tokens that grammars allow, worked out while the model runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.grammar.base import GrammarState
from engine.report import Ints
from engine.wordless import wordless

logger = logging.getLogger(__name__)

Masks = tuple[Ints, Ints]  # rows, [num_masked]; their bits, [num_masked, vocab / 32 rounded up]


class MaskMaker:
    """Fills masks in a thread of its own. The arrays of one call are overwritten by the next."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._bits: Ints = np.zeros((num_slots, -(-vocab_size // 32)), np.int32)
        self._pool: ThreadPoolExecutor | None = None

    def start(self, rows: Sequence[int], states: Sequence[GrammarState]) -> Callable[[], Masks]:
        """Begin to fill the masks of `states`; what is returned waits for them. rows: the sample of each."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        job = self._pool.submit(self._fill, states)
        found = np.array(rows, np.int32)
        return lambda: (found, job.result())

    def close(self) -> None:
        """End the thread. Can be called twice."""
        if self._pool is not None:
            self._pool.shutdown()

    def _fill(self, states: Sequence[GrammarState]) -> Ints:
        bits = self._bits[: len(states)]
        for row, state in zip(bits, states, strict=True):
            try:
                state.fill(row)
            except Exception as error:
                # Its own request ends, for no token is left to it; the others go on.
                logger.error("a grammar could not say what may come next", exc_info=wordless(error))
                row[:] = 0
        return bits
