"""When a copy has to leave: Serve stops it, or the end of its node is announced.

Serve tells user code of a stop at the very end, by `__del__`, once all streams are over, and has no hook for the
beginning: `check_health` is not called any more, which it is not while the controller is away either, and signals
reach the main thread, in which no code of ours runs. What Serve keeps itself, a flag of its replica, is private; this
is the one place that looks at it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import ray
from ray.serve.exceptions import RayServeException

from cluster.lifecycle.node_drains import FAILURES

STOP_POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0  # between two looks at whether the node is drained, by each copy
logger = logging.getLogger(__name__)


class NodeEnd:
    """Whether the end of a copy's nodes is announced. ends: asks, in a thread; what it raises says nothing."""

    def __init__(self, ends: Callable[[], bool]) -> None:
        self._ends = ends
        self._warned = False

    async def look(self) -> bool:
        """Ask once."""
        try:
            return await asyncio.to_thread(self._ends)
        except FAILURES as error:
            if not self._warned:
                logger.warning("Ray does not tell whether this node is drained: %r", error)
            self._warned = True
            return False

    async def wait(self) -> None:
        """Return once it is announced."""
        while not await self.look():
            await asyncio.sleep(LOOK_SECONDS)


async def call_on_leaving(act: Callable[[bool], None], told: Callable[[], bool] | None, node_end: NodeEnd) -> None:
    """Call `act` once Serve stops the copy, and once the end of its node is announced; with whether it is that.

    Serve stops copies on a node that ends, often before the end is noticed here: then `act` is called once.
    told: as of `stop_flag`; None = that is never known.
    """
    ended = asyncio.create_task(node_end.wait())
    stopped = asyncio.create_task(until_stopped(told))
    try:
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and not await node_end.look():
            act(False)
            await ended
        act(True)
    finally:
        ended.cancel()
        stopped.cancel()


async def until_stopped(told: Callable[[], bool] | None) -> None:
    """Return once Serve stops the copy. told: as of `stop_flag`; None = that is never known."""
    if told is None:
        logger.warning("this Ray Serve does not tell when a replica is to stop: routers hear of it from Serve alone")
        await asyncio.Event().wait()
    while told is not None and not told():
        await asyncio.sleep(STOP_POLL_SECONDS)


async def until_others_serve(serving: Callable[[], int], told: Callable[[], bool] | None) -> None:
    """Return once other copies of the deployment serve. serving: how many do, by Serve; asked in a thread.

    told: as of `stop_flag`; a copy that Serve does not stop counts itself. The first look is a moment later: Serve
    may still count copies that it is about to stop for the same reason.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        own = 0 if told is not None and told() else 1
        try:
            if await asyncio.to_thread(serving) > own:
                return
        except (*FAILURES, RayServeException) as error:
            logger.warning("Serve cannot be asked who else serves: %r", error)


def stop_flag() -> Callable[[], bool] | None:
    """Return the flag by which Serve stops this process's replica, None where it keeps that elsewhere."""
    process = getattr(getattr(ray, "_private", None), "worker", None)
    actors = getattr(getattr(process, "global_worker", None), "actors", {})
    for actor in actors.values():
        replica = getattr(actor, "_replica_impl", None)
        if isinstance(getattr(replica, "_shutting_down", None), bool):
            return lambda: bool(getattr(replica, "_shutting_down", False))
    return None
