"""Token ids that end sequences."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.errors import IntegrityError
from engine.report import Ints
from engine.request import Request


class StopTokens:
    """Tells in one gather which of a step's tokens could end anything; the few hits are then looked at one by one.

    Every live sequence watches its `stop_token_ids`; the end-of-sequence ids are always watched.
    """

    def __init__(self, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._watchers: Ints = np.zeros(vocab_size, np.int32)
        self._watchers[list(self.eos_token_ids)] = 1

    def of(self, request: Request) -> tuple[int, ...]:
        """Return all ids that end this request."""
        params = request.params
        return params.stop_token_ids if params.ignore_eos else self.eos_token_ids + params.stop_token_ids

    def watch(self, request: Request) -> None:
        """Count the stop ids of a sequence of `request` that starts to run."""
        for token in request.params.stop_token_ids:
            self._watchers[token] += 1

    def unwatch(self, request: Request) -> None:
        """Undo `watch` when the sequence leaves."""
        for token in request.params.stop_token_ids:
            self._watchers[token] -= 1

    def hits(self, token_ids: Ints) -> NDArray[np.int32]:
        """Return a nonzero figure for every token that someone watches. [num_samples] -> [num_samples]."""
        return self._watchers.take(token_ids)

    def check_integrity(self, watching: Iterable[Request]) -> None:
        """Raise `IntegrityError` unless exactly these sequences' requests are watched for. O(vocabulary)."""
        expected = np.zeros_like(self._watchers)
        expected[list(self.eos_token_ids)] = 1
        for request in watching:
            np.add.at(expected, np.array(request.params.stop_token_ids, np.intp), 1)
        if not np.array_equal(expected, self._watchers):
            raise IntegrityError("stop ids are watched for sequences that left, or not for some that run")
