"""A router's register of replicas: finds each by a lease, links up with it, and lets go when it leaves or dies.

A router keeps one lease call pending. Serve's request router (in the router's own process) holds it back until a
replica exists that the caller does not know, and sends it there; the stream that answers is the router's lease on
that replica. Serve waits for open streams when it stops a replica, and breaks them when the replica dies, so a lease
is also how a router hears of both. Public Ray API: `ray.serve.request_router`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.router.dispatcher import Dispatcher
from cluster.tasks import is_cancelled
from cluster.wire.link import LOST, Announcement, LinkAddress, LinkError, OtherProtocolError, ReplicaLink
from cluster.wire.tcp import connect

logger = logging.getLogger(__name__)
Connect = Callable[[LinkAddress, str], Awaitable[ReplicaLink]]  # (where, the router's id)


class ReplicaWatch:
    """A router's view of the replica set, handed by reference to the request router in the same process.

    `known` holds the ids of replicas that are leased or not wanted now. `on_members` is called on `loop` with all
    running ids whenever Serve changes the set. Sent to a replica it becomes None: it has no meaning elsewhere.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_members: Callable[[frozenset[str]], None]) -> None:
        self.known: set[str] = set()
        self._loop = loop
        self._on_members = on_members

    def members_changed(self, ids: frozenset[str]) -> None:
        """Tell the router, from the request router's thread. Dropped once the router's loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_members, ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


class LeaseRequestRouter(RequestRouter):
    """Serve's request router for the replica deployment: sends each lease call to a replica its caller lacks."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Start without watchers (called by Serve)."""
        self._watches: list[ReplicaWatch] = []
        self._recheck = asyncio.Event()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas unknown to the caller, waiting until there is one; any replica for other calls."""
        # No isinstance: Serve may copy this class by value, and its globals are then not the caller's.
        watch: ReplicaWatch | None = pending_request.kwargs.get("watch") if pending_request else None
        if pending_request is None or watch is None:
            return [candidate_replicas]
        if watch not in self._watches:
            self._watches.append(watch)
            watch.members_changed(self._ids())
        while not pending_request.future.done():
            self._recheck.clear()
            fresh = [r for r in self.curr_replicas.values() if r.replica_id.unique_id not in watch.known]
            if fresh:
                return [fresh]
            await self._wait_for_change()
        # The call was given up, perhaps while a replica was being asked. Serve notices when it is given candidates,
        # and only then: with none it would ask again at once, for ever, and its loop would do nothing else.
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the new set from Serve's controller and pass it on to the watchers."""
        super().update_replicas(replicas)
        self._recheck.set()
        for watch in self._watches:
            watch.members_changed(self._ids())

    async def _wait_for_change(self) -> None:
        # A watch forgets a replica whose link broke without Serve changing the set: look again now and then.
        try:
            await asyncio.wait_for(self._recheck.wait(), timeout=0.25)
        except TimeoutError:
            return

    def _ids(self) -> frozenset[str]:
        return frozenset(replica_id.unique_id for replica_id in self.curr_replicas)


RETRY_SECONDS = 0.25
MOST_RETRY_SECONDS = 4.0  # between two tries of a replica that takes no link
COLD_PATIENCE = 1.0  # seconds until a call is made anew that waits for a first replica
LEASE_PATIENCE = 5.0  # seconds; a replica that has stopped may have been asked, and another have come since


class ReplicaDirectory:
    """Keeps one link per running replica in the dispatcher, for as long as the replica's lease lasts.

    vocabulary: what the router's tokens are of; while an update goes on there may be replicas of another, which get
    nothing from this router. on_demand: the deployment is autoscaled, so no lease call is pending while there is
    nothing to find. rouse: asked until a first replica is found: whether to look for one although no request waits.
    A call that is pending has Serve start one where there is none. node: where the router runs; None = Ray knows.
    open_link: opens a link; None = over TCP.
    """

    def __init__(
        self,
        router_id: str,
        replicas: DeploymentHandle[Any],
        dispatcher: Dispatcher,
        vocabulary: str = "",
        on_demand: bool = False,
        rouse: Callable[[], bool] = lambda: True,
        node: str | None = None,
        open_link: Connect | None = None,
    ) -> None:
        self._router_id = router_id
        self._vocabulary = vocabulary
        self._node = ray.get_runtime_context().get_node_id() if node is None else node
        self._open_link = open_link or connect
        self._lease_call = replicas.options(stream=True).lease
        self._dispatcher = dispatcher
        self._watch = ReplicaWatch(asyncio.get_running_loop(), self._members_changed)
        self._members: frozenset[str] = frozenset()
        self._announced: dict[str, Announcement] = {}
        self._leaving: set[str] = set()  # no longer in Serve's set, or about to leave it, and still in use
        self._going: set[str] = set()  # said that they are to go, and are still in Serve's set
        self._foreign: set[str] = set()  # of another vocabulary or protocol
        self._unlinked: dict[str, str] = {}  # why a replica that was found has no link
        self._refusals: Counter[str] = Counter()  # of links to a replica, one after the other
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_demand = on_demand
        self._found_one = False
        self._rouse = rouse
        self._wake = asyncio.Event()
        dispatcher.call_when_leaving(self._said_to_go)
        if on_demand:
            dispatcher.call_when_waiting(self._wake.set)
        self._spawn(self._search())

    @property
    def announcements(self) -> list[Announcement]:
        """Replicas leased now."""
        return list(self._announced.values())

    @property
    def unlinked(self) -> Mapping[str, str]:
        """Why replicas that were found have no link, by their ids."""
        return self._unlinked

    async def close(self) -> None:
        """Let go of all replicas."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(self) -> None:
        """Keep one lease call pending; each that is answered brings one more replica."""
        while True:
            await self._until_wanted()
            lease = self._lease_call.remote(self._router_id, self._node, watch=self._watch)
            try:
                async with asyncio.timeout(self._patience):
                    announcement = await anext(lease)
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled():
                    raise
                # Whatever Serve raises here (replica gone, app being deployed) is over by itself: ask again. It also
                # cancels a call that was on its way to a replica that died, which looks like the end of this task.
                logger.debug("no lease: %r", error)
                lease.cancel()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if announcement.replica_id in self._watch.known:
                logger.error("replica %s was leased twice; one lease is given back", announcement.replica_id)
                lease.cancel()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._watch.known.add(announcement.replica_id)
            self._found_one = True
            if announcement.vocabulary != self._vocabulary:
                self._leave(announcement.replica_id, "it is of another model, and left to its routers")
                lease.cancel()
                continue
            self._spawn(self._hold(announcement, lease))

    async def _hold(self, announcement: Announcement, lease: Any) -> None:
        """Stay linked to one replica until the link or the lease ends, then make room to find it again."""
        replica_id = announcement.replica_id
        try:
            link = await self._open_link(announcement.address, self._router_id)
            try:
                self._unlinked.pop(replica_id, None)
                del self._refusals[replica_id]
                if link.welcome.draining:
                    self._going.add(replica_id)
                elif replica_id in self._members:  # else it left while the link was made
                    self._announced[replica_id] = announcement
                    self._dispatcher.add_link(link)
                    self._let_leave()
                    await _either(_lease_ended(lease), link.wait_closed())
            finally:
                link.close(LOST, "the lease has ended")
        except OtherProtocolError as error:
            self._leave(replica_id, str(error))
        except LinkError as error:
            self._report_unlinked(replica_id, str(error))
            self._refusals[replica_id] += 1
        finally:
            self._announced.pop(replica_id, None)
            lease.cancel()
            # A replica whose link keeps breaking is tried again, but not in a tight loop.
            pause = min(RETRY_SECONDS * 2 ** self._refusals[replica_id], MOST_RETRY_SECONDS)
            asyncio.get_running_loop().call_later(pause, self._forget, replica_id)

    def _leave(self, replica_id: str, why: str) -> None:
        """Have nothing to do with a replica for as long as it is there."""
        self._foreign.add(replica_id)
        self._report_unlinked(replica_id, why)

    def _report_unlinked(self, replica_id: str, why: str) -> None:
        """Log why a replica has no link, once however often it is tried."""
        if self._unlinked.get(replica_id) != why:
            logger.warning("no link to replica %s: %s", replica_id, why)
        self._unlinked[replica_id] = why

    async def _until_wanted(self) -> None:
        """Return when a lease call has something to find, or should be seen to wait.

        A call that waits counts as demand: with none ever pending Serve would not start a first replica, with one
        always pending it would never leave the deployment without.
        """
        while self._on_demand and not self._is_wanted():
            self._wake.clear()
            with suppress(TimeoutError):  # what `rouse` goes by changes without a word
                async with asyncio.timeout(None if self._found_one else RETRY_SECONDS):
                    await self._wake.wait()

    def _is_wanted(self) -> bool:
        awaited = not self._members and self._dispatcher.queue().requests > 0
        return bool(self._members - self._watch.known) or awaited or (not self._found_one and self._rouse())

    @property
    def _patience(self) -> float:
        """Serve's controller hears of each new call at once where there is no replica."""
        return LEASE_PATIENCE if self._members or not self._on_demand else COLD_PATIENCE

    def _forget(self, replica_id: str) -> None:
        if replica_id not in self._foreign | self._going:
            self._watch.known.discard(replica_id)
        self._leaving.discard(replica_id)
        self._wake.set()

    def _members_changed(self, ids: frozenset[str]) -> None:
        """Take note of Serve's set of replicas."""
        self._leaving = (self._leaving | self._members) - (ids - self._going)
        self._members = ids
        self._watch.known -= (self._foreign | self._going - self._announced.keys()) - ids
        self._foreign &= ids
        self._going &= ids
        for gone in self._unlinked.keys() - ids:
            del self._unlinked[gone], self._refusals[gone]
        self._let_leave()
        self._wake.set()

    def _said_to_go(self, replica_id: str) -> None:
        """Take note that a replica says it is to go, maybe before Serve does."""
        self._going.add(replica_id)
        self._leaving.add(replica_id)
        self._let_leave()

    def _let_leave(self) -> None:
        """Send nothing new to replicas that Serve took out of the set, which may go when they are done.

        Not while those in the set are all of another vocabulary or protocol, or not linked yet: in an update to
        another tokenizer this router serves until a new one does, and Serve stops it then. Where the set is empty it
        has no use for them, and what comes after may need their place.
        """
        staying = self._members - self._going
        if staying and not staying & self._announced.keys():
            return
        for replica_id in self._leaving:
            self._dispatcher.remove_replica(replica_id)
        self._leaving.clear()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the register of replicas failed", exc_info=error)


async def _either(*waits: Coroutine[Any, Any, None]) -> None:
    """Return when the first of `waits` does, and give up the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _lease_ended(lease: Any) -> None:
    """Return when the replica ends the lease or dies."""
    try:
        async for _ in lease:
            pass
    except Exception as error:
        logger.info("lease over: %s", type(error).__name__)
