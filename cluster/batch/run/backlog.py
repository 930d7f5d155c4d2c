"""How many rows are under way: enough that no replica's step waits for rows, whatever the size of the input.

Bounds are all that the replicas take, or what clients' requests leave. Tenants whose batches run side by side get in
by turns, as clients' requests do (`cluster.admission.fair_queue`): whoever has used the fewest tokens, of prompts and
of output, goes first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.admission.capacity import InflightBounds, InflightConfig, OutputLength
from cluster.admission.fair_queue import FairQueue
from cluster.batch.row_requests import Prepared
from cluster.router.dispatcher import Dispatcher

_FIRST, _NEW = 0, 1  # of a tenant's rows, those that were recalled go before the others
QUIET_SECONDS = 1.0  # without a sequence of others, after which the replicas count as free


class BacklogBounds(Protocol):
    """How much may be under way, in sequences, and in tokens of prompts and expected output."""

    def sequences(self) -> int:
        """Return the most sequences."""
        ...

    def tokens(self) -> int:
        """Return the most tokens."""
        ...


@dataclass(eq=False, slots=True)
class _Entry:
    """A row that waits or is inside. called: done when it is let in. goes: whether it was recalled and is inside."""

    tenant: str
    sequences: int
    tokens: int
    called: asyncio.Future[None] | None = None
    recall: Callable[[], object] | None = None
    inside: bool = False
    goes: bool = False


class Backlog:
    """The rows of all batches of one model that are under way. Used on one event loop."""

    def __init__(self, bounds: BacklogBounds) -> None:
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._lengths = OutputLength()
        self._inside: dict[_Entry, None] = {}  # in the order in which they came in
        self._sequences = 0
        self._tokens = 0
        self._going = 0  # sequences of rows that were recalled, and are inside
        self._queue: FairQueue[_Entry] = FairQueue()

    def of(self, tenant: str) -> BatchBacklog:
        """Return the part of one batch, which must be closed. tenant: whose it is."""
        return BatchBacklog(self, tenant)

    def adjust(self) -> None:
        """Act on bounds that have changed: recall those that entered last, or let in those that wait."""
        excess = self._sequences - self._going - self._bounds.sequences()
        for entry in reversed(list(self._inside)[1:] if excess > 0 else ()):
            if excess <= 0:
                break
            if entry.recall is not None:
                recall, entry.recall, entry.goes = entry.recall, None, True
                self._going += entry.sequences
                recall()
                excess -= entry.sequences
        self._let_in()

    def expected(self, prepared: Prepared) -> int:
        """Return the tokens that a row is likely to take, prompts included."""
        output = sum([self._lengths.of(one, one.params.n) for one in prepared.requests])
        return prepared.num_prompt_tokens + output

    async def enter(self, entry: _Entry, cost: int, first: bool) -> None:
        """Return when a row is inside; the caller must then `leave`. cost: tokens that its tenant is charged."""
        if not self._queue and self._fits(entry):
            self._queue.pass_by(entry.tenant, cost)
            self._take_in(entry)
            return
        entry.called = self._loop.create_future()
        self._queue.push(entry.tenant, entry, cost, _FIRST if first else _NEW, entry.tokens)
        self._let_in()
        try:
            await entry.called
        except BaseException:
            self._give_up(entry, _FIRST if first else _NEW)
            raise

    def make_room(self, entry: _Entry) -> None:
        """A row that is inside takes nothing of the replicas any more."""
        if entry.inside:
            entry.inside, entry.recall = False, None
            self._sequences -= entry.sequences
            self._tokens -= entry.tokens
            if entry.goes:
                self._going -= entry.sequences
            self._let_in()

    def leave(self, entry: _Entry, output_tokens: int) -> None:
        """A row has ended with so many tokens of output, or was recalled."""
        self._queue.charge(entry.tenant, output_tokens)
        del self._inside[entry]
        self.make_room(entry)
        if output_tokens:
            self._lengths.seen(output_tokens // entry.sequences)
        if not self._inside and not self._queue:
            self._queue.forget()

    def _let_in(self) -> None:
        while self._queue and self._fits(self._queue.peek()):
            entry = self._queue.pop()
            self._take_in(entry)
            if entry.called is not None and not entry.called.done():
                entry.called.set_result(None)

    def _take_in(self, entry: _Entry) -> None:
        entry.inside = True
        self._inside[entry] = None
        self._sequences += entry.sequences
        self._tokens += entry.tokens

    def _give_up(self, entry: _Entry, priority: int) -> None:
        """A row waits no longer: its batch was stopped."""
        if entry in self._inside:
            self.leave(entry, 0)
        else:
            self._queue.remove(entry.tenant, entry, priority)
            self._let_in()  # it may have been the one that did not fit

    def _fits(self, entry: _Entry) -> bool:
        bounds = self._bounds
        if not self._sequences:
            return bounds.sequences() > 0  # one row may be larger than all replicas
        fits = self._sequences + entry.sequences <= bounds.sequences()
        return fits and self._tokens + entry.tokens <= bounds.tokens()


class BatchBacklog:
    """The rows of one batch in a backlog: they enter in the order in which they ask, and may be recalled."""

    def __init__(self, backlog: Backlog, tenant: str) -> None:
        self._backlog = backlog
        self._tenant = tenant
        self._rows: dict[int, _Entry] = {}

    async def enter(self, prepared: Prepared, first: bool = False) -> None:
        """Return when the row may run; the caller must then `leave`.

        first: before others of its tenant that wait, since it was inside before, and its prompt is paid for.
        """
        sequences = prepared.num_sequences
        entry = _Entry(self._tenant, sequences, self._backlog.expected(prepared))
        cost = 1 if first else prepared.num_prompt_tokens + sequences
        await self._backlog.enter(entry, cost, first)
        self._rows[prepared.task.row] = entry

    def may_recall(self, row: int, recall: Callable[[], object]) -> None:
        """Have `recall` called when the row, which is inside, should make room; it then leaves and enters again."""
        self._rows[row].recall = recall

    def make_room(self, row: int) -> None:
        """The row, if it is inside, takes nothing of the replicas any more."""
        if (entry := self._rows.get(row)) is not None:
            self._backlog.make_room(entry)

    def leave(self, row: int, output_tokens: int) -> None:
        """The row has ended with so many tokens of output, or was recalled."""
        self._backlog.leave(self._rows.pop(row), output_tokens)

    def adjust(self) -> None:
        """See `Backlog.adjust`."""
        self._backlog.adjust()

    def expected(self, prepared: Prepared) -> int:
        """See `Backlog.expected`."""
        return self._backlog.expected(prepared)

    def close(self) -> None:
        """Let all rows leave: the batch has ended, or was stopped."""
        for row in list(self._rows):
            self.leave(row, 0)


def full_bounds(dispatcher: Dispatcher, max_num_seqs: int, max_num_batched_tokens: int) -> InflightBounds:
    """Return bounds that keep the replicas full. max_num_seqs, max_num_batched_tokens: of one replica's step."""
    sizes = InflightConfig(max_num_seqs, max_num_batched_tokens)
    return InflightBounds(sizes, dispatcher.room, dispatcher.counters.outcomes.total)


class BackgroundBounds:
    """Bounds of a batch behind clients: all of `room` while it is alone, else a `share` of it, 0 to 1.

    Others are what replicas report of requests beside those of `dispatcher`, which is the batch's own. Between two
    requests of theirs nothing is taken back at once: what is recalled has its prompt computed again.
    """

    def __init__(
        self, room: InflightBounds, dispatcher: Dispatcher, share: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._room = room
        self._dispatcher = dispatcher
        self._share = share
        self._clock = clock
        self._last_other = float("-inf")

    def sequences(self) -> int:
        """Return the most sequences; at least one, so that a batch always gets on."""
        most = self._room.sequences()
        return max(1, int(self._share * most)) if self._others() else most

    def tokens(self) -> int:
        """Return the most tokens."""
        most = self._room.tokens()
        return max(1, int(self._share * most)) if self._others() else most

    def _others(self) -> bool:
        now = self._clock()
        if self._dispatcher.num_of_others > 0:
            self._last_other = now
        return now - self._last_other < QUIET_SECONDS
