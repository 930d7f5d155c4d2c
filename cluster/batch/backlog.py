"""How much of a batch is under way: enough that no replica's step waits for rows, whatever the size of the input."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.admission.output_length import OutputLength
from cluster.batch.prepare import Prepared


class Bounds(Protocol):
    """How much may be under way, in sequences, and in tokens of prompts and expected output."""

    def sequences(self) -> int:
        """Return the most sequences."""
        ...

    def tokens(self) -> int:
        """Return the most tokens."""
        ...


@dataclass(slots=True)
class _Entry:
    sequences: int
    tokens: int
    recall: Callable[[], object] | None = None
    inside: bool = True


class Backlog:
    """Rows enter in the order in which they ask, as soon as there is room, and may be recalled. On one event loop."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._lengths = OutputLength()
        self._inside: dict[int, _Entry] = {}  # row -> what it takes
        self._sequences = 0
        self._tokens = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self, prepared: Prepared, first: bool = False) -> None:
        """Return when the row may run; whoever entered must `leave`. first: before others that wait."""
        sequences, tokens = prepared.num_sequences, self.expected(prepared)
        while not self._fits(sequences, tokens):
            free: asyncio.Future[None] = self._loop.create_future()
            (self._waiting.appendleft if first else self._waiting.append)(free)
            await free
        self._inside[prepared.task.row] = _Entry(sequences, tokens)
        self._sequences += sequences
        self._tokens += tokens

    def may_recall(self, row: int, recall: Callable[[], object]) -> None:
        """Have `recall` called when the row, which is inside, should make room; it then leaves and enters again."""
        self._inside[row].recall = recall

    def make_room(self, row: int) -> None:
        """The row, which is inside, takes nothing of the replicas any more."""
        entry = self._inside.get(row)
        if entry is not None and entry.inside:
            entry.inside, entry.recall = False, None
            self._sequences -= entry.sequences
            self._tokens -= entry.tokens
            self._admit()

    def leave(self, row: int, output_tokens: int) -> None:
        """The row has ended with so many tokens of output, or was recalled."""
        self.make_room(row)
        entry = self._inside.pop(row)
        if output_tokens:
            self._lengths.seen(output_tokens // entry.sequences)

    def look(self) -> None:
        """Act on bounds that have changed: recall those that entered last, or let those try again who wait."""
        excess = self._sequences - self._bounds.sequences()
        for entry in reversed(list(self._inside.values())[1:] if excess > 0 else ()):
            if excess <= 0:
                break
            if entry.recall is not None:
                recall, entry.recall = entry.recall, None
                recall()
                excess -= entry.sequences
        self._admit()

    def expected(self, prepared: Prepared) -> int:
        """Return the tokens that a row is likely to take, prompts included."""
        output = sum([self._lengths.of(one, one.params.n) for one in prepared.requests])
        return prepared.num_prompt_tokens + output

    def _admit(self) -> None:
        while self._waiting:
            free = self._waiting.popleft()
            if not free.done():
                free.set_result(None)

    def _fits(self, sequences: int, tokens: int) -> bool:
        bounds = self._bounds
        if not self._sequences:
            return bounds.sequences() > 0  # one row may be larger than all replicas
        return self._sequences + sequences <= bounds.sequences() and self._tokens + tokens <= bounds.tokens()
