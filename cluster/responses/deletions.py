"""Which answers were deleted: remembered for as long as a copy may be left that could not be reached at the time.

Routers and replicas tell each other on each new link, and pass on what is new: so a deletion comes wherever a copy
comes from that was cut off, also where those that heard of it first have died since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from cluster.accounts.tenant_bytes import TenantBytes
from cluster.wire.answer_messages import Deleted, Deletion

MOST = 50_000  # of all tenants, which have equal shares: all are sent at once on each new link
MOST_AT_ONCE = 1000  # in one message


class Deletions:
    """Times are seconds of a clock that is never set, always the same one.

    Where there are too many those go that are over first, a new one too: so all who tell each other keep the same.
    """

    def __init__(self) -> None:
        self._until: dict[str, dict[tuple[str, str], float]] = {}  # by tenant; by name and `born`
        self._order: dict[str, list[tuple[float, tuple[str, str]]]] = {}  # by tenant: heaps of the same
        self._room = TenantBytes(MOST, self._evict)

    def learn(self, told: Iterable[Deletion], now: float) -> tuple[Deletion, ...]:
        """Remember what was deleted; return what was not known."""
        for tenant, order in list(self._order.items()):
            while order and order[0][0] <= now:
                self._evict(tenant)
            if not order:
                del self._order[tenant], self._until[tenant]
        return tuple([one for one in told if self._is_new(one, now)])

    def knows(self, tenant: str, name: str, born: str) -> bool:
        """Return whether this answer was deleted."""
        return (name, born) in self._until.get(tenant, ())

    def knows_name(self, tenant: str, name: str) -> bool:
        """Return whether any answer of this name was deleted."""
        return any(one == name for one, _ in self._until.get(tenant, ()))

    def told(self, now: float) -> Iterator[Deleted]:
        """Return what a new link is told."""
        left = [
            Deletion(name, tenant, born, until - now)
            for tenant, known in self._until.items()
            for (name, born), until in known.items()
            if until > now
        ]
        for start in range(0, len(left), MOST_AT_ONCE):
            yield Deleted(tuple(left[start : start + MOST_AT_ONCE]))

    def _is_new(self, one: Deletion, now: float) -> bool:
        if self.knows(one.tenant, one.name, one.born):
            return False
        key, until = (one.name, one.born), now + one.left
        self._until.setdefault(one.tenant, {})[key] = until
        heappush(self._order.setdefault(one.tenant, []), (until, key))
        self._room.take(one.tenant, 1)
        self._room.make_room(one.tenant, 0)
        return self.knows(one.tenant, one.name, one.born)

    def _evict(self, tenant: str) -> bool:
        if not self._order.get(tenant):
            return False
        del self._until[tenant][heappop(self._order[tenant])[1]]
        self._room.give_back(tenant, 1)
        return True
