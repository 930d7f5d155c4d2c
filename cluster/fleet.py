"""The replicas that a router holds links to: reading them, noticing that one died, choosing one for a request."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from random import Random
from typing import Protocol

from cluster.admission.figures import QueueFigures
from cluster.admission.room import ReplicaRoom
from cluster.dispatch_config import DispatcherConfig
from cluster.link import DAMAGED, STALLED, SUPERSEDED, LinkClosedError, ReplicaLink
from cluster.member import LiveRequest, Member
from cluster.message_parts import BlockUpdate, Costs, Load
from cluster.messages import Down, Heartbeat, Ping, Resync, Up
from cluster.routing.cache_reports import CacheReports
from cluster.routing.chooser import Chooser

logger = logging.getLogger(__name__)

# Messages of one replica that are read before all others get their turn. After a pause reports wait in plenty: read
# in one go they would make every consumer look slow, read one by one each token would travel alone to its client.
MESSAGES_PER_TURN = 16
POOL_AGE = 0.05  # seconds for which the replicas that take requests are not looked for anew


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as a router sees it now. `age`: seconds since its engine is known to have moved.

    costs: None until it has told them.
    """

    replica_id: str
    incarnation: int
    draining: bool
    ready: bool
    num_requests: int
    age: float
    load: Load
    costs: Costs | None = None


class FleetListener(Protocol):
    """Who acts on what the replicas say and on their loss."""

    def on_message(self, member: Member, message: Down) -> None:
        """A replica said something."""

    def on_lost(self, member: Member, code: str, message: str) -> None:
        """A replica's link is over; the member is no longer in the fleet."""

    def on_overstay(self, member: Member) -> None:
        """A draining replica has not finished what it runs in good time. Told again as long as that is so."""

    def queue(self) -> QueueFigures:
        """Return what waits for replicas."""
        ...


class Fleet:
    """Links by replica id, one reader task each, and a watch over silence. Used on one event loop."""

    def __init__(self, config: DispatcherConfig, listener: FleetListener, rng: Random) -> None:
        self.caches = CacheReports(self._ask_for_blocks, config.resync_interval)
        self._chooser = Chooser(config, self.caches.index, rng)
        self._config = config
        self._listener = listener
        self._members: dict[str, Member] = {}
        self._pool: list[Member] = []  # those that new requests may run on, for a moment
        self._pool_until = 0.0
        self._loop = asyncio.get_running_loop()
        self._watcher = self._loop.create_task(self._watch())

    @property
    def members(self) -> list[Member]:
        """The replicas whose links hold."""
        return list(self._members.values())

    def get(self, replica_id: str) -> Member | None:
        """Return a replica by its id."""
        return self._members.get(replica_id)

    def add(self, link: ReplicaLink) -> Member:
        """Take in a new link; one to an earlier life of the same replica is given up."""
        former = self._members.get(link.replica_id)
        if former is not None:
            self.lose(former, SUPERSEDED, "the router has a newer link")
        member = Member(link, self._loop.time())
        self._members[link.replica_id] = member
        self._pool = []
        member.reader = self._loop.create_task(self._read(member))
        return member

    def lose(self, member: Member, code: str, message: str) -> None:
        """Give a replica's link up, now and for good."""
        if member.gone:
            return
        member.gone = True
        if self._members.get(member.replica_id) is member:
            del self._members[member.replica_id]
            self._pool = []
            self.caches.drop(member.replica_id)
        member.link.close(code, message)
        if member.reader is not None and member.reader is not asyncio.current_task():
            member.reader.cancel()
        self._listener.on_lost(member, code, message)

    def has_ready(self) -> bool:
        """Whether some replica takes requests and moves."""
        now = self._loop.time()
        return any(self._is_ready(member, now) for member in self._members.values())

    def room(self) -> ReplicaRoom | None:
        """Return what the replicas hold that take requests and move, None where there are none."""
        now = self._loop.time()
        sizes = [member.kv_tokens for member in self._members.values() if self._is_ready(member, now)]
        return ReplicaRoom(len(sizes), sum(sizes)) if sizes else None

    def views(self) -> list[ReplicaView]:
        """Return a snapshot of all replicas."""
        now = self._loop.time()
        return [
            ReplicaView(
                member.replica_id,
                member.incarnation,
                member.draining,
                self._is_ready(member, now),
                len(member.live),
                member.progress_age(now),
                member.load,
                member.costs,
            )
            for member in self._members.values()
        ]

    def choose(self, live: LiveRequest) -> Member | None:
        """Return the replica that `live` should run on, or None while there is none for it."""
        while pool := self._pool_for(live):
            chosen = self._chooser.choose(live, pool)
            if pool is not self._pool or (chosen.takes_requests and chosen.probe is None):
                return chosen
            self._pool = []  # it was put together a moment ago
        return None

    def note_blocks(self, member: Member, update: BlockUpdate) -> None:
        """Take in what a replica's prefix cache gained and lost."""
        self.caches.note_update(member.replica_id, update, self._loop.time())

    def note_heartbeat(self, member: Member, heartbeat: Heartbeat) -> None:
        """Take in what a replica says when it has nothing to report."""
        member.note_load(heartbeat.load, heartbeat.others)
        member.note_costs(heartbeat.costs)
        self.caches.note_count(member.replica_id, heartbeat.block_updates, self._loop.time())

    def model_changed(self, live: LiveRequest) -> bool:
        """Whether all replicas that take requests run another model than the one `live` has tokens of."""
        pool = [member for member in self._members.values() if member.takes_requests]
        return bool(pool) and not any(member.can_continue(live) for member in pool)

    def has_successor(self, live: LiveRequest) -> bool:
        """Whether a replica that takes requests may go on with `live` now."""
        return any(member.takes_requests for member in self._pool_for(live))

    def is_suspect(self, live: LiveRequest) -> bool:
        """Whether one more death without progress would put the request in quarantine."""
        return live.strikes >= self._config.quarantine_deaths - 1

    async def close(self, code: str) -> None:
        """End all links, and wait until their tasks have ended."""
        members = self.members
        for member in members:
            self.lose(member, code, "the router stops")
        self._watcher.cancel()
        tasks = [member.reader for member in members if member.reader is not None]
        await asyncio.gather(self._watcher, *tasks, return_exceptions=True)
        await asyncio.gather(*(member.link.wait_closed() for member in members))

    def _is_ready(self, member: Member, now: float) -> bool:
        return member.takes_requests and member.progress_age(now) <= self._config.stall_timeout

    def _pool_for(self, live: LiveRequest) -> list[Member]:
        """Return the replicas that `live` may run on, in the order of their ids; for new requests as of late."""
        now = self._loop.time()
        usual = live.log.fingerprint is None and not self.is_suspect(live)
        if usual and self._pool and now < self._pool_until:
            return self._pool
        pool = [m for m in self._members.values() if m.takes_requests and m.can_continue(live)]
        unprobed = [member for member in pool if member.probe is None]
        pool = unprobed if self.is_suspect(live) else unprobed or pool
        pool = [member for member in pool if self._is_ready(member, now)] or pool
        pool.sort(key=lambda member: member.replica_id)
        if usual and unprobed:
            self._pool, self._pool_until = pool, now + POOL_AGE
        return pool

    def _ask_for_blocks(self, replica_id: str) -> None:
        member = self._members.get(replica_id)
        if member is not None and not member.link.closed:
            self._tell(member, Resync())

    async def _read(self, member: Member) -> None:
        try:
            while not member.gone:
                for _ in range(MESSAGES_PER_TURN):
                    message = await member.link.receive()
                    member.last_heard = self._loop.time()
                    self._listener.on_message(member, message)
                    if member.gone:
                        return
                await asyncio.sleep(0)
        except LinkClosedError as error:
            self.lose(member, error.code, error.message)
        except Exception:
            # A fault of ours in reading one replica must not strand its requests.
            logger.exception("the link to replica %s failed", member.replica_id)
            self.lose(member, DAMAGED, "a message could not be handled")

    async def _watch(self) -> None:
        period = min(self._config.stall_timeout / 6, self._config.ping_interval / 2)
        while True:
            due = self._loop.time() + period
            await asyncio.sleep(period)
            now = self._loop.time()
            ping = self._ping()
            for member in self.members:
                # Time in which this process did not run is no silence of theirs: what they said waits to be read.
                member.last_heard = min(now, member.last_heard + max(0.0, now - due))
                self._attend(member, now, ping)

    def _ping(self) -> Ping:
        queue = self._listener.queue()
        return Ping(queue.requests, queue.tokens, max(0.0, queue.age), queue.rate)

    def _attend(self, member: Member, now: float, ping: Ping) -> None:
        if member.draining:
            member.drains_since = now if member.drains_since is None else member.drains_since
            if now - member.drains_since > self._config.hand_over_after:
                self._listener.on_overstay(member)
        if now - member.last_heard > self._config.stall_timeout:
            self.lose(member, STALLED, f"silent for {self._config.stall_timeout:g} s")
        elif member.load.progress_age > self._config.progress_timeout:
            self.lose(member, STALLED, f"its engine has not moved for {self._config.progress_timeout:g} s")
        elif now - member.last_ping >= self._config.ping_interval and not member.link.closed:
            member.last_ping = now
            self._tell(member, ping)

    def _tell(self, member: Member, message: Up) -> None:
        try:
            member.link.send(message)
        except LinkClosedError as error:
            # Later, not now: whoever is at work on what the replica said should finish first.
            self._loop.call_soon(self.lose, member, error.code, error.message)
