"""When Ray Serve has told this replica to stop. The one place that looks into Serve's replica.

Serve tells user code at the very end, by `__del__`, once all streams are over, and has no hook for the beginning:
`check_health` is not called any more, which it is not while the controller is away either, and signals reach the
main thread, in which no code of ours runs. What it keeps itself, a flag of its replica, is private.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import ray

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1


async def call_when_told_to_stop(act: Callable[[], None], told: Callable[[], bool] | None) -> None:
    """Call `act` once Serve has told the replica to stop. told: as of `stop_flag`; None = that is never known."""
    if told is None:
        logger.warning("this Ray Serve does not tell when a replica is to stop: routers hear of it from Serve alone")
        return
    while not told():
        await asyncio.sleep(LOOK_SECONDS)
    act()


def stop_flag() -> Callable[[], bool] | None:
    """Return what tells whether Serve has told this process's replica to stop, None where it keeps that elsewhere."""
    process = getattr(getattr(ray, "_private", None), "worker", None)
    actors = getattr(getattr(process, "global_worker", None), "actors", {})
    for actor in actors.values():
        replica = getattr(actor, "_replica_impl", None)
        if isinstance(getattr(replica, "_shutting_down", None), bool):
            return lambda: bool(getattr(replica, "_shutting_down", False))
    return None
