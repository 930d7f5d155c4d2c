"""Which of the linked replicas a request may run on, the choice of one, and those that are waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from cluster.admission.capacity import ReplicaCapacity
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.prefix_index import Overlap, PrefixIndex, PromptKeys
from cluster.router.quarantine import Blame
from cluster.router.replica_handle import LiveRequest, ReplicaHandle
from cluster.routing_policies import RoutingQuery, policy_named
from cluster.wire.link import ENGINE_DEAD, LOST, STALLED

NOTHING = Overlap()
MIGRATED_TOKENS = 8192  # those of a step of a GPU: so many that move are let in whatever else waits
POOL_AGE = 0.05  # seconds for which the replicas that take requests are not looked for anew
GATHER_TIME = 2.0  # seconds
SILENT_WAIT = 15.0  # seconds for which one that fell silent counts as there, though it has no link


class Selection:
    """Looks at the linked replicas of one router. Used on its event loop.

    One that has said nothing for half of `stall_timeout`, many times longer than it may, gets nothing until it
    speaks: where a network is cut all are as silent, though each is given up at another moment. None is given much
    more of what moves that it has to compute first than it has of new requests: neither are those who come behind all
    that moves, nor does that wait until no new request comes.

    replicas: by replica id, as they are at any time. clock: seconds.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        replicas: Mapping[str, ReplicaHandle],
        absent: Absent,
        blame: Blame,
        chooser: Chooser,
        clock: Callable[[], float],
    ) -> None:
        self.chooser = chooser
        self._stall_timeout = config.stall_timeout
        self._linked = replicas
        self._absent = absent
        self._blame = blame
        self._clock = clock
        self._usual: list[ReplicaHandle] = []  # those that new requests may run on, for a moment
        self._usual_until = 0.0

    def choose(self, live: LiveRequest, num_waiting: int = 0) -> ReplicaHandle | None:
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
        """Take note that the replicas have changed."""
        self._usual = []

    def takers(self) -> list[ReplicaHandle]:
        """Return those that take requests."""
        return [replica for replica in self._linked.values() if replica.takes_requests]

    def has_ready(self) -> bool:
        """Whether some replica takes requests and moves."""
        return any(map(self.is_ready, self._linked.values()))

    def is_ready(self, replica: ReplicaHandle) -> bool:
        """Whether a replica takes requests and moves."""
        return replica.takes_requests and replica.progress_age(self._clock()) <= self._stall_timeout

    def is_heard(self, replica: ReplicaHandle) -> bool:
        """Whether a replica has spoken lately."""
        return self._clock() - replica.last_heard <= self._stall_timeout / 2

    def room(self) -> ReplicaCapacity | None:
        """Return what the replicas hold that take requests and move, or else all that take them; None without any.

        One in the middle of a long step does not move for a while, and is there nevertheless. So is, for a while, one
        that fell silent.
        """
        takers = self.takers()
        sizes = [replica.kv_tokens for replica in takers if self.is_ready(replica)]
        sizes = sizes or [replica.kv_tokens for replica in takers] or self._absent.kv_tokens(self._clock())
        return ReplicaCapacity(len(sizes), sum(sizes)) if sizes else None

    @property
    def shares_out(self) -> bool:
        """Whether what waits is shared among replicas that come back: each end there lets another one in."""
        return self._absent.gathers(self._clock())

    def has_taker(self, live: LiveRequest) -> bool:
        """Whether a replica that takes requests may go on with `live` in time, if not now."""
        return any(replica.can_continue(live) for replica in self.takers())

    def has_successor(self, live: LiveRequest) -> bool:
        """Whether a replica that takes requests may go on with `live` now."""
        return any(replica.takes_requests for replica in self._pool_for(live))

    def silent_until(self, live: LiveRequest) -> float:
        """Return how long `live` should wait at least for replicas that fell silent, a time that may have passed."""
        return self._absent.silent_until(live, self._clock())

    def model_changed(self, live: LiveRequest) -> bool:
        """Whether all replicas that take requests run another model than the one `live` has tokens of."""
        waits = self.has_taker(live) or self.silent_until(live) > self._clock()
        return not waits and bool(self.takers())

    def _pool_for(self, live: LiveRequest, num_waiting: int = 0) -> list[ReplicaHandle]:
        """Return the replicas that `live` may run on, in the order of their ids; for new requests as of late."""
        now = self._clock()
        suspect = self._blame.is_suspect(live)
        usual = live.log.fingerprint is None and not suspect and not live.was_submitted and not num_waiting
        if usual and self._usual and now < self._usual_until:
            return self._usual
        pool = [replica for replica in self.takers() if replica.can_continue(live) and self.is_heard(replica)]
        if live.was_submitted:
            pool = [replica for replica in pool if replica.migrating < max(MIGRATED_TOKENS, replica.uncomputed_new)]
        if num_waiting:
            pool = self._absent.spare(pool, self.takers(), num_waiting, now)
        unprobed = [replica for replica in pool if not replica.probes]
        if suspect:
            pool = [] if self._blame.awaits_word(live) else [m for m in pool if self._blame.allows(m, live)]
        else:
            pool = unprobed or pool
        pool = [replica for replica in pool if self.is_ready(replica)] or pool
        pool.sort(key=lambda replica: replica.replica_id)
        if usual and unprobed:
            self._usual, self._usual_until = pool, now + POOL_AGE
        return pool


class Chooser:
    """The policy of one router, with what it needs to remember between two choices."""

    def __init__(self, config: DispatcherConfig, index: PrefixIndex, rng: Random) -> None:
        self._policy = policy_named(config.routing_policy)
        self._config = config
        self._index = index
        self._rng = rng
        self._turn = 0

    def choose(self, live: LiveRequest, pool: Sequence[ReplicaHandle]) -> ReplicaHandle:
        """Return the replica of `pool`, at least one, that `live` should run on. pool: in the order of their ids.

        Notes in `live` what the replica's prefix cache should have of it.
        """
        request = live.log.request
        live.predicted = None
        if len(pool) == 1:
            return pool[0]
        looks = self._policy.reads_prefixes
        size = pool[0].block_size
        found = self._index.look_up(self._keys(live, size)) if looks else NOTHING
        session = live.context.session_id.encode() + request.cache_salt if live.context.session_id else b""
        overlaps = {replica_id: depth * size for replica_id, depth in found.depths.items()}
        query = RoutingQuery(len(request.prompt_token_ids), overlaps, found.cold_key, found.heir, session, self._turn)
        self._turn += 1
        chosen: ReplicaHandle = self._policy.pick(pool, query, self._rng, self._config.policy)
        if looks:
            reusable = request.reusable_tokens(live.log.longest, live.log.num_scored)
            if found.cold_key is not None:
                self._index.expect(found.cold_key, chosen.replica_id)
            live.predicted = min(overlaps.get(chosen.replica_id, 0), reusable // size * size)
        return chosen

    def _keys(self, live: LiveRequest, block_size: int) -> PromptKeys:
        if live.keys is None:
            request = live.log.request
            prompt = request.prompt_token_ids[: self._config.max_hashed_tokens]
            live.keys = PromptKeys(prompt, block_size, request.cache_salt)
        return live.keys


@dataclass(frozen=True, slots=True)
class _Silent:
    until: float
    kv_tokens: int
    fingerprint: str


class Absent:
    """Replicas whose links were lost, by id, until each is found again, another has come for it, or it is not
    waited for any more.

    Where all were lost, those that come back share what waits: for `GATHER_TIME` after each none is given more than
    its part, so that the first does not run what the others could a moment later.

    return_time: seconds for which one is expected back, or another in its place.
    """

    def __init__(self, return_time: float) -> None:
        self._silent: dict[str, _Silent] = {}
        self._expected: dict[str, float] = {}  # until when
        self._return_time = return_time
        self._gathers_until = float("-inf")

    def lost(self, replica: ReplicaHandle, code: str, now: float) -> None:
        """Take note that a replica's link is over."""
        if code in (STALLED, ENGINE_DEAD, LOST):
            self._expected[replica.replica_id] = now + self._return_time
        if code == STALLED:
            self._silent[replica.replica_id] = _Silent(now + SILENT_WAIT, replica.kv_tokens, replica.fingerprint)

    def found(self, replica_id: str, others: bool, now: float) -> float | None:
        """Take note that a replica has a link: one that was lost, or another. others: whether it is not the only one.

        Returns until when what waits is shared among those that come back, None where it is not.
        """
        self._silent.pop(replica_id, None)
        if not self._num_expected(now):
            return None
        self._expected.pop(replica_id if replica_id in self._expected else next(iter(self._expected)))
        if others and not self.gathers(now):
            return None
        self._gathers_until = now + GATHER_TIME
        return self._gathers_until

    def has_left(self, replica_id: str) -> None:
        """Take note that a replica will not be found again."""
        self._silent.pop(replica_id, None)

    def gathers(self, now: float) -> bool:
        """Whether those that come back share what waits."""
        return now < self._gathers_until

    def spare(
        self, pool: list[ReplicaHandle], present: list[ReplicaHandle], num_waiting: int, now: float
    ) -> list[ReplicaHandle]:
        """Return those of `pool` that may have one of `num_waiting` requests that wait. present: all there are."""
        if not self.gathers(now) or not pool:
            return pool
        total = num_waiting + sum([len(replica.live) for replica in present])
        share = -(-total // (len(present) + self._num_expected(now)))
        return [replica for replica in pool if len(replica.live) < share]

    def _num_expected(self, now: float) -> int:
        self._expected = {name: until for name, until in self._expected.items() if until > now}
        return len(self._expected)

    def silent_until(self, live: LiveRequest, now: float) -> float:
        """Return how long `live` should wait for those that fell silent; long past where none is waited for."""
        model, past = live.log.fingerprint, float("-inf")
        return max((one.until for one in self._present(now) if model in (None, one.fingerprint)), default=past)

    def kv_tokens(self, now: float) -> list[int]:
        """Return the tokens of each one's KV cache."""
        return [one.kv_tokens for one in self._present(now)]

    def _present(self, now: float) -> list[_Silent]:
        self._silent = {name: one for name, one in self._silent.items() if one.until > now}
        return list(self._silent.values())
