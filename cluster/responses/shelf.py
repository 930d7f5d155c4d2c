"""The answers that a router keeps, within bounds: the oldest that have ended go first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from cluster.answer_log import Kept
from cluster.errors import ApiError
from cluster.responses.copies import Copies
from cluster.responses.record import Record
from cluster.responses.view import AnswerView

MOST_BYTES = 512 << 20  # of all answers that one router keeps
MOST_OF_ONE = 64 << 20
GRACE = 30.0  # seconds for the clients of an answer that is made for them alone to come back
DROPS = ("expired", "evicted", "deleted", "superseded", "refused")
Drop = Literal["expired", "evicted", "deleted", "superseded", "refused"]


@dataclass(slots=True, eq=False)
class Owned:
    """An answer that this router makes or has made. view: None of one whose frames are made again when asked for.

    task: while it runs. gone: it is kept no more. taken: another router has gone on with it. outgrown: it was ended
    because it took too much. readers: who wait for it here. read_at: when somebody last did, here or elsewhere, on
    the event loop's clock.
    """

    record: Record
    kept: Kept
    view: AnswerView | None = None
    task: asyncio.Task[None] | None = None
    gone: bool = False
    taken: bool = False
    outgrown: bool = False
    readers: int = 0
    read_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    counted: int = 0

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return self.record.size + (0 if self.view is None else self.view.size)

    @contextmanager
    def read(self) -> Iterator[None]:
        """Count a reader while the block runs."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            self.read_at = asyncio.get_running_loop().time()

    def is_abandoned(self, now: float) -> bool:
        """Return whether it is ended, as nobody has waited for it for long."""
        waited_for = self.readers or now - self.read_at < GRACE
        return self.task is not None and self.record.head.needs_client and not waited_for


class Shelf:
    """Used on one event loop. most_bytes: of all answers, None = `MOST_BYTES`.

    dropped: how many were, by reason, since the router started.
    """

    def __init__(self, copies: Copies, most_bytes: int | None = None) -> None:
        self.num_bytes = 0
        self.dropped: Counter[str] = Counter()
        self._copies = copies
        self._most_bytes = MOST_BYTES if most_bytes is None else most_bytes
        self._owned: dict[str, Owned] = {}  # those that ended come first, the oldest before all

    def __contains__(self, name: str) -> bool:
        return name in self._owned

    def __iter__(self) -> Iterator[Owned]:
        return iter(list(self._owned.values()))

    def __len__(self) -> int:
        return len(self._owned)

    def get(self, name: str, tenant: str | None = None) -> Owned | None:
        """Return an answer. tenant: it must be this one's; None = any."""
        one = self._owned.get(name)
        return one if one is not None and tenant in (None, one.record.head.tenant) else None

    def put(self, one: Owned) -> None:
        """Keep an answer, as the last one."""
        name = one.record.head.name
        self._owned.pop(name, None)
        self._owned[name] = one
        self.weigh(one)

    def weigh(self, one: Owned) -> None:
        """Take note of what an answer takes now."""
        size = one.size if self._owned.get(one.record.head.name) is one else 0
        self.num_bytes += size - one.counted
        one.counted = size

    def has_room(self, size: int) -> bool:
        """Return whether so many bytes more fit as it is."""
        return self.num_bytes + size <= self._most_bytes

    def make_room(self, size: int) -> None:
        """Drop the oldest answers that have ended until there is room. Raises `ApiError` (`overloaded`)."""
        if self.has_room(size):  # asked for each note of each answer: nothing is walked then
            return
        for one in self:
            if one.task is None:
                self.drop(one, "evicted")
                if self.has_room(size):
                    return
        message = "the server keeps as many unfinished responses as it may; try again later"
        raise ApiError("overloaded", message, retry_after=5)

    def outgrown(self, one: Owned) -> ApiError | None:
        """Return the error that ends an answer which takes more than there is room for."""
        if one.size > MOST_OF_ONE:
            message = (
                f"the answer takes more than the {MOST_OF_ONE >> 20} MiB that the server keeps of one; ask for fewer "
                "tokens or log-probabilities, or do not have it kept"
            )
            return ApiError("answer_too_large", message)
        try:
            self.make_room(0)
        except ApiError as error:
            return error
        return None

    def drop(self, one: Owned, why: Drop) -> None:
        """Keep an answer no more; one that runs is ended."""
        name = one.record.head.name
        one.gone = True
        if self._owned.get(name) is one:
            del self._owned[name]
            self.dropped[why] += 1
            self.weigh(one)
            self._copies.drop(name)
        if one.task is not None:
            one.task.cancel()
