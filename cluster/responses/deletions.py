"""Which answers were deleted: remembered for as long as a copy may be left that could not be reached at the time.

Routers and replicas tell each other on each new link, and pass on what is new: so a deletion comes wherever a copy
comes from that was cut off, also where those that heard of it first have died since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cluster.wire.answer_messages import Deleted, Deletion

MOST = 10_000  # of one tenant: its oldest go first
MOST_AT_ONCE = 1000  # in one message


class Deletions:
    """Times are seconds of a clock that is never set, always the same one."""

    def __init__(self) -> None:
        self._until: dict[str, dict[tuple[str, str], float]] = {}  # by tenant; by name and `born`, the oldest first

    def learn(self, told: Iterable[Deletion], now: float) -> tuple[Deletion, ...]:
        """Remember what was deleted; return what was not known."""
        return tuple([one for one in told if self._is_new(one, now)])

    def knows(self, tenant: str, name: str, born: str) -> bool:
        """Return whether this answer was deleted."""
        return (name, born) in self._until.get(tenant, ())

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
        known = self._until.setdefault(one.tenant, {})
        if self.knows(one.tenant, one.name, one.born):
            return False
        while known and (known[oldest := next(iter(known))] <= now or len(known) >= MOST):
            del known[oldest]
        known[one.name, one.born] = now + one.left
        return True
