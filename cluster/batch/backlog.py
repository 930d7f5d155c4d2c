"""How much of a batch is under way: enough that no replica's step waits for rows, whatever the size of the input."""

from __future__ import annotations

import asyncio
from collections import deque

from cluster.admission.output_length import OutputLength
from cluster.admission.room import UNBOUNDED, ReplicaRoom, Room, RoomConfig
from cluster.batch.prepare import Prepared
from cluster.dispatcher import Dispatcher


class Backlog:
    """Rows enter in the order in which they ask, as soon as the replicas have room for them, and a little before.

    max_num_seqs, max_num_batched_tokens: of one replica's step. Used on one event loop.
    """

    def __init__(self, dispatcher: Dispatcher, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        def present() -> ReplicaRoom:
            # Without a replica some rows wait in the dispatcher, for as long as it takes until one is there.
            return dispatcher.room() or ReplicaRoom(1, UNBOUNDED)

        self._loop = asyncio.get_running_loop()
        self._room = Room(
            RoomConfig(max_num_seqs, max_num_batched_tokens),
            present,
            dispatcher.counters.outcomes.total,
            self._loop.time,
        )
        self._lengths = OutputLength()
        self._inside: dict[int, tuple[int, int]] = {}  # row -> its sequences and tokens
        self._sequences = 0
        self._tokens = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def tokens(self) -> int:
        """Tokens of the rows that are under way, with the output that is expected of them."""
        return self._tokens

    async def enter(self, prepared: Prepared) -> None:
        """Return when the row may run; whoever entered must `leave`."""
        sequences, tokens = prepared.num_sequences, self.expected(prepared)
        while not self._fits(sequences, tokens):
            free: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(free)
            await free
        self._inside[prepared.task.row] = sequences, tokens
        self._sequences += sequences
        self._tokens += tokens

    def leave(self, row: int, output_tokens: int) -> None:
        """The row has ended with so many tokens of output."""
        sequences, tokens = self._inside.pop(row)
        self._sequences -= sequences
        self._tokens -= tokens
        if output_tokens:
            self._lengths.seen(output_tokens // sequences)
        self.look()

    def look(self) -> None:
        """Let those try again who wait: there may be more room, or more replicas."""
        while self._waiting:
            free = self._waiting.popleft()
            if not free.done():
                free.set_result(None)

    def expected(self, prepared: Prepared) -> int:
        """Return the tokens that a row is likely to take, prompts included."""
        output = sum([self._lengths.of(one, one.params.n) for one in prepared.requests])
        return prepared.num_prompt_tokens + output

    def _fits(self, sequences: int, tokens: int) -> bool:
        if not self._inside:
            return True  # one row may be larger than all replicas
        return self._sequences + sequences <= self._room.sequences() and self._tokens + tokens <= self._room.tokens()
