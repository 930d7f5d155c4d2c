"""The replicas that a router holds links to: reading them, noticing that one died, choosing one for a request."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from random import Random
from typing import Protocol

from cluster.admission.figures import QueueFigures
from cluster.router.absent import Absent
from cluster.router.blame import Blame
from cluster.router.dispatch_config import DispatcherConfig
from cluster.router.member import Member
from cluster.router.pool import Pool
from cluster.router.routing.cache_reports import CacheReports
from cluster.router.routing.chooser import Chooser
from cluster.telemetry.aside import Aside
from cluster.wire.link import DAMAGED, STALLED, SUPERSEDED, LinkClosedError, ReplicaLink
from cluster.wire.message_parts import BlockUpdate, Costs, Load
from cluster.wire.messages import Down, Heartbeat, Ping, Rejected, Report, Resync, Up
from engine.telemetry.wordless import wordless

logger = logging.getLogger(__name__)

# Messages of one replica that are read before all others get their turn. After a pause reports wait in plenty: read
# in one go they would make every consumer look slow, read one by one each token would travel alone to its client.
MESSAGES_PER_TURN = 16


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

    def on_room(self) -> None:
        """What waits may find a replica now: one spoke after a silence, or need not be spared any more."""

    def on_overstay(self, member: Member) -> None:
        """A draining replica has not finished what it runs in good time. Told again as long as that is so."""

    def queue(self) -> QueueFigures:
        """Return what waits for replicas."""
        ...

    def submitted(self) -> int:
        """Return the stream key that no submit so far has reached."""
        ...


class Fleet:
    """Links by replica id, one reader task each, and a watch over silence. Used on one event loop.

    pool: says which of them a request may run on. served_until: when a replica that takes requests was there last.
    """

    def __init__(self, config: DispatcherConfig, listener: FleetListener, rng: Random, blame: Blame) -> None:
        """blame: says which requests may run beside which."""
        self._loop = asyncio.get_running_loop()
        self._members: dict[str, Member] = {}
        self._absent = Absent(config.no_replica_timeout)
        self.caches = CacheReports(self._ask_for_blocks, config.resync_interval)
        chooser = Chooser(config, self.caches.index, rng)
        self.pool = Pool(config, self._members, self._absent, blame, chooser, self._loop.time)
        self._aside = Aside()
        self.served_until = float("-inf")
        self._config = config
        self._listener = listener
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
        member = Member(link, self._loop.time(), self._config.identity(link.welcome.fingerprint))
        self._members[link.replica_id] = member
        others = any(one is not member for one in self.pool.takers())
        if gathers_until := self._absent.found(link.replica_id, others, self._loop.time()):
            self._loop.call_at(gathers_until, self._listener.on_room)
        self.pool.refresh()
        member.reader = self._loop.create_task(self._read(member))
        return member

    def lose(self, member: Member, code: str, message: str) -> None:
        """Give a replica's link up, now and for good."""
        self._lose_all([(member, code, message)])

    def has_left(self, replica_id: str) -> None:
        """Take note that a replica whose link is over will not be found again."""
        self._absent.has_left(replica_id)

    def _lose_all(self, ends: list[tuple[Member, str, str]]) -> None:
        """Give links up, each with a code and a message: all of them before anything that ran there moves."""
        ends = [end for end in ends if not end[0].gone]
        for member, code, message in ends:
            self._drop(member, code, message)
        for member, code, message in ends:
            self._listener.on_lost(member, code, message)

    def _drop(self, member: Member, code: str, message: str) -> None:
        now = self._loop.time()
        if member.takes_requests:
            self.served_until = now
        self._absent.lost(member, code, now)
        member.gone = True
        if self._members.get(member.replica_id) is member:
            del self._members[member.replica_id]
            self.pool.refresh()
            self.caches.drop(member.replica_id)
        member.link.close(code, message)
        if member.reader is not None and member.reader is not asyncio.current_task():
            member.reader.cancel()

    def views(self) -> list[ReplicaView]:
        """Return a snapshot of all replicas."""
        now = self._loop.time()
        return [
            ReplicaView(
                member.replica_id,
                member.incarnation,
                member.draining,
                self.pool.is_ready(member),
                len(member.live),
                member.progress_age(now),
                member.load,
                member.costs,
            )
            for member in self._members.values()
        ]

    def note_blocks(self, member: Member, update: BlockUpdate) -> None:
        """Take in what a replica's prefix cache gained and lost."""
        self._aside.do(self.caches.note_update, member.replica_id, update, self._loop.time())

    def note_heartbeat(self, member: Member, heartbeat: Heartbeat) -> None:
        """Take in what a replica says now and then of itself."""
        member.note_load(heartbeat.load, heartbeat.others)
        member.note_costs(heartbeat.costs)
        self.caches.note_count(member.replica_id, heartbeat.block_updates, self._loop.time())

    async def close(self, code: str) -> None:
        """End all links, and wait until their tasks have ended."""
        members = self.members
        for member in members:
            self.lose(member, code, "the router stops")
        self._watcher.cancel()
        tasks = [member.reader for member in members if member.reader is not None]
        await asyncio.gather(self._watcher, *tasks, return_exceptions=True)
        await asyncio.gather(*(member.link.wait_closed() for member in members))

    def _ask_for_blocks(self, replica_id: str) -> None:
        member = self._members.get(replica_id)
        if member is not None and not member.link.closed:
            self._tell(member, Resync())

    async def _read(self, member: Member) -> None:
        try:
            while not member.gone:
                for _ in range(MESSAGES_PER_TURN):
                    message = await member.link.receive()
                    was_heard, member.last_heard = self.pool.is_heard(member), self._loop.time()
                    self._hear(member, message)
                    if member.gone:
                        return
                    if not was_heard:
                        self._listener.on_room()
                await asyncio.sleep(0)
        except LinkClosedError as error:
            self.lose(member, error.code, error.message)
        except Exception as error:
            # A fault of ours in reading one replica must not strand its requests.
            logger.error("the link to replica %s failed", member.replica_id, exc_info=wordless(error))
            self.lose(member, DAMAGED, "a message could not be handled")

    def _hear(self, member: Member, message: Down) -> None:
        """Have the listener act on what a replica said; only where requests may miss some of it the link is lost."""
        try:
            self._listener.on_message(member, message)
        except Exception as error:
            if isinstance(message, Report | Rejected):
                raise
            told = type(message).__name__, member.replica_id
            logger.error("a %s of replica %s could not be handled", *told, exc_info=wordless(error))

    async def _watch(self) -> None:
        period = min(self._config.stall_timeout / 6, self._config.ping_interval / 2)
        while True:
            due = self._loop.time() + period
            await asyncio.sleep(period)
            now = self._loop.time()
            ping = self._aside.do(self._ping) or Ping()
            for member in self._members.values():
                # Time in which this process did not run is no silence of theirs: what they said waits to be read.
                member.last_heard = min(now, member.last_heard + max(0.0, now - due))
                if member.takes_requests:
                    self.served_until = now
            self._aside.do(self._lose_overdue, now)
            for member in self.members:
                self._aside.do(self._attend, member, now, ping)

    def _ping(self) -> Ping:
        queue = self._listener.queue()
        submitted = self._listener.submitted()
        return Ping(queue.requests, queue.tokens, max(0.0, queue.age), queue.rate, submitted)

    def _lose_overdue(self, now: float) -> None:
        """Give up whoever is silent or does not move for too long."""
        silent, stuck = self._config.stall_timeout, self._config.progress_timeout
        ends = []
        for member in self._members.values():
            if now - member.last_heard > silent:
                ends.append((member, STALLED, f"silent for {silent:g} s"))
            elif member.load.progress_age > stuck:
                ends.append((member, STALLED, f"its engine has not moved for {stuck:g} s"))
        self._lose_all(ends)

    def _attend(self, member: Member, now: float, ping: Ping) -> None:
        if member.draining:
            member.drains_since = now if member.drains_since is None else member.drains_since
            if now - member.drains_since > self._config.hand_over_after:
                self._listener.on_overstay(member)
        if now - member.last_ping >= self._config.ping_interval and not member.link.closed:
            member.last_ping = now
            self._tell(member, ping)

    def _tell(self, member: Member, message: Up) -> None:
        try:
            member.link.send(message)
        except LinkClosedError as error:
            # Later, not now: whoever is at work on what the replica said should finish first.
            self._loop.call_soon(self.lose, member, error.code, error.message)
