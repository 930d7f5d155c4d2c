"""A gateway's register of routers: finds each by a lease, and lets it go once it is to stop or is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.ingress.router_pool import KnownRouter, RouterPool
from cluster.lifecycle.leases import LEASE_PATIENCE, RETRY_SECONDS, ReplicaWatch, either, lease_ended, next_lease
from cluster.wire.link import LinkAddress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterAnnouncement:
    """One router. copy: Serve's name of it. address: where it takes exchanges."""

    router_id: str
    copy: str
    address: LinkAddress


class RouterDirectory:
    """Keeps all routers that serve in the pool of a gateway. Made on its event loop. node: of the gateway."""

    def __init__(self, gateway_id: str, node: str, routers: DeploymentHandle[Any], pool: RouterPool) -> None:
        self._gateway_id = gateway_id
        self._node = node
        self._lease_call = routers.options(stream=True).lease
        self._pool = pool
        self._watch = ReplicaWatch(asyncio.get_running_loop(), self._members_changed)
        self._members: frozenset[str] = frozenset()
        self._held: dict[str, KnownRouter] = {}  # by Serve's name
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._search())

    async def close(self) -> None:
        """Let go of all routers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(self) -> None:
        """Keep one lease call pending; each that is answered brings one more router."""
        while True:
            found = await next_lease(self._ask_for_one, LEASE_PATIENCE)
            if found is None:
                continue
            announcement, lease = found
            self._watch.known.add(announcement.copy)
            self._spawn(self._hold(announcement, lease))

    def _ask_for_one(self) -> Any:
        return self._lease_call.remote(self._gateway_id, self._node, watch=self._watch)

    async def _hold(self, announcement: RouterAnnouncement, lease: Any) -> None:
        """Have a router in the pool until it is gone, or is to stop and has answered what it was asked."""
        router = KnownRouter(announcement.router_id, announcement.address)
        if announcement.copy not in self._members:
            router.dismiss()
        self._held[announcement.copy] = router
        try:
            await either(self._pool.hold(router), lease_ended(lease), router.left())
        except OSError as error:
            log.warning("no connection to router %s: %s", announcement.router_id, error)
        finally:
            del self._held[announcement.copy]
            lease.cancel()
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._watch.known.discard, announcement.copy)

    def _members_changed(self, ids: frozenset[str]) -> None:
        """Take note of Serve's set of routers; who is not in it any more is to stop."""
        self._members = ids
        for copy, router in self._held.items():
            if copy not in ids:
                router.dismiss()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the register of routers failed", exc_info=error)
