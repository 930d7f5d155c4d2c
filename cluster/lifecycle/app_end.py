"""How long the streams of an app that is deleted may go on: who deletes it tells its routers.

Serve tells a router that it stops, not why: in an update others go on with its streams, however long they are.
"""

from __future__ import annotations

import logging

from cluster.lifecycle import control_store

logger = logging.getLogger(__name__)


def announce_end(app: str, seconds: float) -> None:
    """Have routers end what still runs so long after they are stopped. Raises one of `control_store.FAILURES`."""
    control_store.put(_key(app), repr(seconds).encode())


def forget_end(app: str) -> None:
    """Have routers that are stopped wait for others, as in an update. Raises one of `control_store.FAILURES`."""
    control_store.delete(_key(app))


def announced_end(app: str) -> float | None:
    """Return the seconds that streams get, None where the app is not deleted. Blocks."""
    try:
        told = control_store.get(_key(app))
        return None if told is None else float(told)
    except (*control_store.FAILURES, ValueError) as error:
        logger.warning("Ray's control store does not say whether the app ends: %r", error)
        return None


def _key(app: str) -> str:
    return f"/{app}/end"
