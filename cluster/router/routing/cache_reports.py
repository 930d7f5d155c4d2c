"""What the replicas tell of their prefix caches: kept in the index, and asked for anew when some of it is missing."""

from __future__ import annotations

from collections.abc import Callable

from cluster.router.routing.prefix_index import PrefixIndex
from cluster.wire.message_parts import BlockUpdate


class CacheReports:
    """Feeds the index of one router.

    ask: has a replica, by its id, tell all that its prefix cache holds. interval: seconds between two such wishes.
    num_resyncs: wishes so far.
    """

    def __init__(self, ask: Callable[[str], None], interval: float) -> None:
        self.index = PrefixIndex()
        self.num_resyncs = 0
        self._ask = ask
        self._interval = interval
        self._asked: dict[str, float] = {}  # replica id -> when it was asked last

    def note_update(self, replica_id: str, update: BlockUpdate, now: float) -> None:
        """Take in what a cache gained and lost."""
        whole = self.index.update(replica_id, update.sequence, update.stored, update.removed, update.cleared)
        self._settle(replica_id, whole, now)

    def note_count(self, replica_id: str, num_updates: int, now: float) -> None:
        """Take in how many updates a replica has sent: the last one may be the one that was lost."""
        self._settle(replica_id, self.index.heard_all(replica_id, num_updates), now)

    def drop(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        self.index.drop(replica_id)
        self._asked.pop(replica_id, None)

    def _settle(self, replica_id: str, whole: bool, now: float) -> None:
        if whole or now - self._asked.get(replica_id, -self._interval) < self._interval:
            return
        self._asked[replica_id] = now
        self.num_resyncs += 1
        self._ask(replica_id)
