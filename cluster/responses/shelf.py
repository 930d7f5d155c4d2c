"""The answers that a router keeps, within bounds: the oldest that ended go first, of tenants that have most."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from cluster.accounts.tenant_bytes import TenantBytes
from cluster.answer_log import Kept
from cluster.errors import ApiError
from cluster.responses.copies import Copies
from cluster.responses.record import Record
from cluster.responses.view import AnswerView

MOST_BYTES = 512 << 20  # of all answers that one router keeps; tenants have equal shares of it
MOST_OF_ONE = 64 << 20
GRACE = 30.0  # seconds for the clients of an answer that is made for them alone to come back
DROPS = ("expired", "evicted", "deleted", "superseded", "refused")
Drop = Literal["expired", "evicted", "deleted", "superseded", "refused"]


@dataclass(slots=True, eq=False)
class Owned:
    """An answer that this router makes or has made. view: None of one whose frames are made again when asked for.

    task: while it runs. gone: it is kept no more. known: a replica is known to have had a copy. taken: another
    router has it now. anew: that one has made it from its beginning. outgrown: it was ended because it took too much.
    readers: who wait for it here. read_at: when somebody last did, here or elsewhere, on the event loop's clock.
    """

    record: Record
    kept: Kept
    view: AnswerView | None = None
    task: asyncio.Task[None] | None = None
    gone: bool = False
    known: bool = False
    taken: bool = False
    anew: bool = False
    outgrown: bool = False
    readers: int = 0
    read_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    counted: int = 0

    def leave(self) -> None:
        """Have another router make it, and charge for it."""
        self.taken, self.anew = True, not self.known

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
        self.dropped: Counter[str] = Counter()
        self._copies = copies
        self._bytes = TenantBytes(MOST_BYTES if most_bytes is None else most_bytes, self._evict)
        self._owned: dict[str, Owned] = {}
        self._ended: defaultdict[str, dict[str, Owned]] = defaultdict(dict)  # by tenant, the oldest first

    def __contains__(self, name: str) -> bool:
        return name in self._owned

    def __iter__(self) -> Iterator[Owned]:
        return iter(list(self._owned.values()))

    def __len__(self) -> int:
        return len(self._owned)

    @property
    def num_bytes(self) -> int:
        """Bytes that all take."""
        return self._bytes.num_bytes

    def get(self, name: str, tenant: str | None = None) -> Owned | None:
        """Return an answer. tenant: it must be this one's; None = any."""
        one = self._owned.get(name)
        return one if one is not None and tenant in (None, one.record.head.tenant) else None

    def put(self, one: Owned) -> None:
        """Keep an answer; of those that have ended, as the last one."""
        head = one.record.head
        self._owned[head.name] = one
        if one.record.end is not None:
            self._ended[head.tenant][head.name] = one
        self.weigh(one)

    def weigh(self, one: Owned) -> None:
        """Take note of what an answer takes now."""
        head = one.record.head
        size = one.size if self._owned.get(head.name) is one else 0
        self._bytes.take(head.tenant, size - one.counted)
        one.counted = size

    def has_room(self, size: int) -> bool:
        """Return whether so many bytes more fit as it is."""
        return self.num_bytes + size <= self._bytes.most

    def make_room(self, tenant: str, size: int) -> None:
        """Drop the oldest answers that have ended until there is room. Raises `ApiError` (`overloaded`)."""
        if not self._bytes.make_room(tenant, size):
            most = f"{self._bytes.most >> 20} MiB, which tenants share"
            message = f"the server keeps as many unfinished responses of this tenant as it may (of {most}); try later"
            raise ApiError("overloaded", message, retry_after=5)

    def _evict(self, tenant: str) -> bool:
        oldest = next(iter(self._ended[tenant].values()), None)
        if oldest is not None:
            self.drop(oldest, "evicted")
        return oldest is not None

    def outgrown(self, one: Owned) -> ApiError | None:
        """Return the error that ends an answer which takes more than there is room for."""
        if one.size > MOST_OF_ONE:
            message = (
                f"the answer takes more than the {MOST_OF_ONE >> 20} MiB that the server keeps of one; ask for fewer "
                "tokens or log-probabilities, or do not have it kept"
            )
            return ApiError("answer_too_large", message)
        try:
            self.make_room(one.record.head.tenant, 0)
        except ApiError as error:
            return error
        return None

    def drop(self, one: Owned, why: Drop) -> None:
        """Keep an answer no more; one that runs is ended."""
        name, tenant = one.record.head.name, one.record.head.tenant
        one.gone = True
        if self._owned.get(name) is one:
            del self._owned[name]
            self._ended[tenant].pop(name, None)
            self.dropped[why] += 1
            self.weigh(one)
            self._copies.drop(name)
        if one.task is not None:
            one.task.cancel()
