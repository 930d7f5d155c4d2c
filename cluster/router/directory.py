"""A router's register of replicas: finds each by a lease, links up with it, and lets go when it leaves or dies."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle

from cluster.lifecycle.leases import LEASE_PATIENCE, RETRY_SECONDS, ReplicaWatch, either, lease_ended, next_lease
from cluster.router.dispatcher import Dispatcher
from cluster.wire.link import LOST, Announcement, LinkAddress, LinkError, OtherProtocolError, ReplicaLink
from cluster.wire.tcp import connect

logger = logging.getLogger(__name__)
Connect = Callable[[LinkAddress, str], Awaitable[ReplicaLink]]  # (where, the router's id)


MOST_RETRY_SECONDS = 4.0  # between two tries of a replica that takes no link
COLD_PATIENCE = 1.0  # seconds until a call is made anew that waits for a first replica


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
        self._ending: set[str] = set()  # of those that are leaving: they end with their nodes, whoever comes after
        self._foreign: set[str] = set()  # of another vocabulary or protocol
        self._unlinked: dict[str, str] = {}  # why a replica that was found has no link
        self._refusals: Counter[str] = Counter()  # of links to a replica, one after the other
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_demand = on_demand
        self._found_one = False
        self._rouse = rouse
        self._wake = asyncio.Event()
        dispatcher.call_when_leaving(self._said_to_go)
        dispatcher.ask_for_links(self._has_all_links, self._reaches_all)
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
            found = await next_lease(self._ask_for_one, self._patience)
            if found is None:
                continue
            announcement, lease = found
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

    def _ask_for_one(self) -> Any:
        return self._lease_call.remote(self._router_id, self._node, watch=self._watch)

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
                    await either(lease_ended(lease), link.wait_closed())
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

    def _has_all_links(self) -> bool:
        apart = self._foreign | self._going | self._unlinked.keys()
        return self._members - apart <= self._announced.keys()

    def _reaches_all(self) -> bool:
        return self._members - self._going <= self._announced.keys()

    def _forget(self, replica_id: str) -> None:
        if replica_id not in self._foreign | self._going:
            self._watch.known.discard(replica_id)
        self._let_leave()
        self._leaving.discard(replica_id)
        self._ending.discard(replica_id)
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

    def _said_to_go(self, replica_id: str, ends: bool) -> None:
        """Take note that a replica says it is to go, maybe before Serve does. ends: its node is to end as well."""
        self._going.add(replica_id)
        self._leaving.add(replica_id)
        if ends:
            self._ending.add(replica_id)
        self._let_leave()

    def _let_leave(self) -> None:
        """Send nothing new to replicas that Serve took out of the set, which may go when they are done.

        Not while those in the set are all of another vocabulary or protocol, or not linked yet: in an update to
        another tokenizer this router serves until a new one does, and Serve stops it then. Where the set is empty it
        has no use for them, and what comes after may need their place: but for those whose nodes end, which serve as
        long as there is no other.
        """
        for replica_id in self._leaving - self._announced.keys():
            self._dispatcher.remove_replica(replica_id)  # its link is over: it is known now that it has left
            self._leaving.discard(replica_id)
        staying = self._members - self._going
        others = staying & self._announced.keys()
        if staying and not others:
            return
        for replica_id in self._leaving if others else self._leaving - self._ending:
            self._dispatcher.remove_replica(replica_id)
        self._leaving = set() if others else self._leaving & self._ending
        self._ending &= self._leaving

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the register of replicas failed", exc_info=error)
