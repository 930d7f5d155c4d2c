"""Which of the linked replicas a request may run on, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cluster.admission.room import ReplicaRoom
from cluster.router.absent import Absent
from cluster.router.blame import Blame
from cluster.router.dispatch_config import DispatcherConfig
from cluster.router.member import LiveRequest, Member
from cluster.router.routing.chooser import Chooser

MIGRATED_TOKENS = 8192  # those of a step, most often: so many that move are let in whatever else waits
POOL_AGE = 0.05  # seconds for which the replicas that take requests are not looked for anew


class Pool:
    """Looks at the members of one fleet. Used on its event loop.

    One that has said nothing for half of `stall_timeout`, many times longer than it may, gets nothing until it
    speaks: where a network is cut all are as silent, though each is given up at another moment. None is given much
    more of what moves that it has to compute first than it has of new requests: neither are those who come behind all
    that moves, nor does that wait until nobody comes.

    members: by replica id, as they are at any time. clock: seconds.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        members: Mapping[str, Member],
        absent: Absent,
        blame: Blame,
        chooser: Chooser,
        clock: Callable[[], float],
    ) -> None:
        self.chooser = chooser
        self._stall_timeout = config.stall_timeout
        self._members = members
        self._absent = absent
        self._blame = blame
        self._clock = clock
        self._usual: list[Member] = []  # those that new requests may run on, for a moment
        self._usual_until = 0.0

    def choose(self, live: LiveRequest, num_waiting: int = 0) -> Member | None:
        """Return the replica that `live` should run on, or None while there is none for it.

        num_waiting: of how many that wait it is one; 0 = it has not waited.
        """
        while pool := self._pool_for(live, num_waiting):
            chosen = self.chooser.choose(live, pool)
            if pool is not self._usual or (chosen.takes_requests and not chosen.probes):
                return chosen
            self._usual = []  # it was put together a moment ago
        return None

    def refresh(self) -> None:
        """Take note that the members have changed."""
        self._usual = []

    def takers(self) -> list[Member]:
        """Return those that take requests."""
        return [member for member in self._members.values() if member.takes_requests]

    def has_ready(self) -> bool:
        """Whether some replica takes requests and moves."""
        return any(map(self.is_ready, self._members.values()))

    def is_ready(self, member: Member) -> bool:
        """Whether a replica takes requests and moves."""
        return member.takes_requests and member.progress_age(self._clock()) <= self._stall_timeout

    def is_heard(self, member: Member) -> bool:
        """Whether a replica has spoken lately."""
        return self._clock() - member.last_heard <= self._stall_timeout / 2

    def room(self) -> ReplicaRoom | None:
        """Return what the replicas hold that take requests and move, or else all that take them; None without any.

        One in the middle of a long step does not move for a while, and is there nevertheless. So is, for a while, one
        that fell silent.
        """
        takers = self.takers()
        sizes = [member.kv_tokens for member in takers if self.is_ready(member)]
        sizes = sizes or [member.kv_tokens for member in takers] or self._absent.kv_tokens(self._clock())
        return ReplicaRoom(len(sizes), sum(sizes)) if sizes else None

    def has_taker(self, live: LiveRequest) -> bool:
        """Whether a replica that takes requests may go on with `live` in time, if not now."""
        return any(member.can_continue(live) for member in self.takers())

    def has_successor(self, live: LiveRequest) -> bool:
        """Whether a replica that takes requests may go on with `live` now."""
        return any(member.takes_requests for member in self._pool_for(live))

    def silent_until(self, live: LiveRequest) -> float:
        """Return how long `live` should wait at least for replicas that fell silent, a time that may have passed."""
        return self._absent.silent_until(live, self._clock())

    def model_changed(self, live: LiveRequest) -> bool:
        """Whether all replicas that take requests run another model than the one `live` has tokens of."""
        waits = self.has_taker(live) or self.silent_until(live) > self._clock()
        return not waits and bool(self.takers())

    def _pool_for(self, live: LiveRequest, num_waiting: int = 0) -> list[Member]:
        """Return the replicas that `live` may run on, in the order of their ids; for new requests as of late."""
        now = self._clock()
        suspect = self._blame.is_suspect(live)
        usual = live.log.fingerprint is None and not suspect and not live.was_submitted and not num_waiting
        if usual and self._usual and now < self._usual_until:
            return self._usual
        pool = [member for member in self.takers() if member.can_continue(live) and self.is_heard(member)]
        if live.was_submitted:
            pool = [member for member in pool if member.migrating < max(MIGRATED_TOKENS, member.uncomputed_new)]
        if num_waiting:
            pool = self._absent.spare(pool, self.takers(), num_waiting, now)
        unprobed = [member for member in pool if not member.probes]
        if suspect:
            pool = [] if self._blame.awaits_word(live) else [m for m in pool if self._blame.allows(m, live)]
        else:
            pool = unprobed or pool
        pool = [member for member in pool if self.is_ready(member)] or pool
        pool.sort(key=lambda member: member.replica_id)
        if usual and unprobed:
            self._usual, self._usual_until = pool, now + POOL_AGE
        return pool
