"""The replicas that a router holds links to: reading them, and noticing that one died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.prefix_index import CacheReports
from cluster.router.quarantine import Blame
from cluster.router.replica_handle import ReplicaHandle
from cluster.router.selection import Absent, Chooser, Selection
from cluster.telemetry.logs import BestEffort
from cluster.wire.codec import Down, Up
from cluster.wire.link import DAMAGED, DRAINED, STALLED, SUPERSEDED, LinkClosedError, ReplicaLink
from cluster.wire.parts import Load, ReplicaCosts
from cluster.wire.replica_messages import BlockUpdate, Heartbeat, Rejected, Report
from cluster.wire.router_messages import Ping, Resync
from engine.errors import redacted

logger = logging.getLogger(__name__)

# Messages of one replica that are read before all others get their turn. After a pause reports wait in plenty: read
# in one go they would make every consumer look slow, read one by one each token would travel alone to its client.
MESSAGES_PER_TURN = 16


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as a router sees it now. `age`: seconds since its engine is known to have moved.

    costs: None before its first report of them. asleep: level at which it sleeps, 0 = awake.
    block_size: tokens of a KV block, of which it has `num_kv_blocks`.
    """

    replica_id: str
    incarnation: int
    draining: bool
    ready: bool
    num_requests: int
    age: float
    load: Load
    costs: ReplicaCosts | None = None
    block_size: int = 0
    num_kv_blocks: int = 0
    asleep: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaEvents:
    """Callbacks of a replica set.

    message: a replica sent a message. lost: its link is over, with code and message, and it is not in the set any
    more. room: waiting requests may find a replica: one spoke after a silence, or need not be spared any more.
    overstay: a draining replica has not finished what it runs within `hand_over_after`, or hands it over; called
    again as long as that is so. ping: returns the message that replicas get every `ping_interval`.
    """

    message: Callable[[ReplicaHandle, Down], None]
    lost: Callable[[ReplicaHandle, str, str], None]
    room: Callable[[], None]
    overstay: Callable[[ReplicaHandle], None]
    ping: Callable[[], Ping]


class ReplicaSet:
    """Links by replica id, one reader task each, and a watch over silence. Used on one event loop.

    selection: says which of them a request may run on. served_until: when one that takes requests was there last.
    blame: says which requests may run beside which. events: called while the loop runs, never by the constructor.
    """

    def __init__(self, config: DispatcherConfig, rng: Random, blame: Blame, events: ReplicaEvents) -> None:
        self._loop = asyncio.get_running_loop()
        self._linked: dict[str, ReplicaHandle] = {}
        self._absent = Absent(config.no_replica_timeout)
        self.caches = CacheReports(self._ask_for_blocks, config.resync_interval)
        chooser = Chooser(config, self.caches.index, rng)
        self.selection = Selection(config, self._linked, self._absent, blame, chooser, self._loop.time)
        self._best_effort = BestEffort()
        self.served_until = float("-inf")
        self._config = config
        self._events = events
        self._watcher = self._loop.create_task(self._watch())

    @property
    def linked(self) -> list[ReplicaHandle]:
        """The replicas whose links hold."""
        return list(self._linked.values())

    def get(self, replica_id: str) -> ReplicaHandle | None:
        """Return a replica by its id."""
        return self._linked.get(replica_id)

    def add(self, link: ReplicaLink) -> ReplicaHandle:
        """Take in a new link; one to an earlier life of the same replica is given up."""
        former = self._linked.get(link.replica_id)
        if former is not None:
            self.lose(former, SUPERSEDED, "the router has a newer link")
        replica = ReplicaHandle(link, self._loop.time(), self._config.identity(link.welcome.fingerprint))
        self._linked[link.replica_id] = replica
        others = any(one is not replica for one in self.selection.takers())
        if gathers_until := self._absent.found(link.replica_id, others, self._loop.time()):
            self._loop.call_at(gathers_until, self._events.room)
        self.selection.refresh()
        replica.reader = self._loop.create_task(self._read(replica))
        return replica

    def lose(self, replica: ReplicaHandle, code: str, message: str) -> None:
        """Give a replica's link up, now and for good."""
        self._lose_all([(replica, code, message)])

    def retire_if_idle(self, replica: ReplicaHandle) -> None:
        """Give up the link of a draining replica once none of this router's requests runs there."""
        if replica.draining and not replica.live:
            self.lose(replica, DRAINED, "the replica has finished what it ran")

    def send(self, replica: ReplicaHandle, message: Up) -> None:
        """Send a message whose loss does no harm; a link that turns out to be over is given up a moment later."""
        if not replica.link.closed:
            try:
                replica.link.send(message)
            except LinkClosedError as error:
                # Later, not now: the caller may be iterating over what runs there.
                self._loop.call_soon(self.lose, replica, error.code, error.message)

    def has_left(self, replica_id: str) -> None:
        """Take note that a replica whose link is over will not be found again."""
        self._absent.has_left(replica_id)

    def _lose_all(self, ends: list[tuple[ReplicaHandle, str, str]]) -> None:
        """Give links up, each with a code and a message: all of them before anything that ran there moves."""
        ends = [end for end in ends if not end[0].gone]
        for replica, code, message in ends:
            self._drop(replica, code, message)
        for replica, code, message in ends:
            self._events.lost(replica, code, message)

    def _drop(self, replica: ReplicaHandle, code: str, message: str) -> None:
        now = self._loop.time()
        if replica.takes_requests:
            self.served_until = now
        self._absent.lost(replica, code, now)
        replica.gone, replica.gone_at = True, now
        if self._linked.get(replica.replica_id) is replica:
            del self._linked[replica.replica_id]
            self.selection.refresh()
            self.caches.drop(replica.replica_id)
        replica.link.close(code, message)
        if replica.reader is not None and replica.reader is not asyncio.current_task():
            replica.reader.cancel()

    def views(self) -> list[ReplicaView]:
        """Return a snapshot of all replicas."""
        now = self._loop.time()
        return [
            ReplicaView(
                replica.replica_id,
                replica.incarnation,
                replica.draining,
                self.selection.is_ready(replica),
                len(replica.live),
                replica.progress_age(now),
                replica.load,
                replica.costs,
                replica.block_size,
                replica.num_kv_blocks,
                replica.sleep.level if replica.asleep else 0,
            )
            for replica in self._linked.values()
        ]

    def note_blocks(self, replica: ReplicaHandle, update: BlockUpdate) -> None:
        """Take in what a replica's prefix cache gained and lost."""
        self._best_effort.do(self.caches.note_update, replica.replica_id, update, self._loop.time())

    def note_heartbeat(self, replica: ReplicaHandle, heartbeat: Heartbeat) -> None:
        """Take in what a replica says now and then of itself."""
        slept = replica.asleep
        replica.note(heartbeat)
        if replica.asleep != slept:
            self.selection.refresh()
            if slept:
                self._events.room()
        self.caches.note_count(replica.replica_id, heartbeat.block_updates, self._loop.time())

    async def close(self, code: str) -> None:
        """End all links, and wait until their tasks have ended."""
        replicas = self.linked
        for replica in replicas:
            self.lose(replica, code, "the router stops")
        self._watcher.cancel()
        tasks = [replica.reader for replica in replicas if replica.reader is not None]
        await asyncio.gather(self._watcher, *tasks, return_exceptions=True)
        await asyncio.gather(*(replica.link.wait_closed() for replica in replicas))

    def _ask_for_blocks(self, replica_id: str) -> None:
        replica = self._linked.get(replica_id)
        if replica is not None:
            self.send(replica, Resync())

    async def _read(self, replica: ReplicaHandle) -> None:
        try:
            while not replica.gone:
                for _ in range(MESSAGES_PER_TURN):
                    message = await replica.link.receive()
                    was_heard, replica.last_heard = self.selection.is_heard(replica), self._loop.time()
                    self._hear(replica, message)
                    if replica.gone:
                        return
                    if not was_heard:
                        self._events.room()
                await asyncio.sleep(0)
        except LinkClosedError as error:
            self.lose(replica, error.code, error.message)
        except Exception as error:
            # A fault of ours in reading one replica must not strand its requests.
            logger.error("the link to replica %s failed", replica.replica_id, exc_info=redacted(error))
            self.lose(replica, DAMAGED, "a message could not be handled")

    def _hear(self, replica: ReplicaHandle, message: Down) -> None:
        """Pass on what a replica said; only where requests may miss some of it the link is lost."""
        try:
            self._events.message(replica, message)
        except Exception as error:
            if isinstance(message, Report | Rejected):
                raise
            told = type(message).__name__, replica.replica_id
            logger.error("a %s of replica %s could not be handled", *told, exc_info=redacted(error))

    async def _watch(self) -> None:
        period = min(self._config.stall_timeout / 6, self._config.ping_interval / 2)
        while True:
            due = self._loop.time() + period
            await asyncio.sleep(period)
            now = self._loop.time()
            ping = self._best_effort.do(self._events.ping) or Ping()
            silent = [replica for replica in self._linked.values() if not self.selection.is_heard(replica)]
            for replica in self._linked.values():
                # Time in which this process did not run is no silence of theirs: what they said waits to be read.
                replica.last_heard = min(now, replica.last_heard + max(0.0, now - due))
                if replica.takes_requests:
                    self.served_until = now
            if any(map(self.selection.is_heard, silent)):
                self._best_effort.do(self._events.room)
            self._best_effort.do(self._lose_overdue, now)
            for replica in self.linked:
                self._best_effort.do(self._attend, replica, now, ping)

    def _lose_overdue(self, now: float) -> None:
        """Give up replicas that are silent, or make no progress, for too long."""
        silent, stuck = self._config.stall_timeout, self._config.progress_timeout
        ends = []
        for replica in self._linked.values():
            if now - replica.last_heard > silent:
                ends.append((replica, STALLED, f"silent for {silent:g} s"))
            elif replica.load.progress_age > stuck:
                ends.append((replica, STALLED, f"its engine has not moved for {stuck:g} s"))
        self._lose_all(ends)

    def _attend(self, replica: ReplicaHandle, now: float, ping: Ping) -> None:
        if replica.draining:
            replica.drains_since = now if replica.drains_since is None else replica.drains_since
            if replica.hands_over or now - replica.drains_since > self._config.hand_over_after:
                self._events.overstay(replica)
        if now - replica.last_ping >= self._config.ping_interval and not replica.link.closed:
            replica.last_ping = now
            self.send(replica, ping)
