"""Processes that end with their node. Ray takes up to half a minute to end those of a dead raylet; they serve on.

A process whose raylet is gone is not managed any more: Serve has given it up and starts another in its place.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from typing import NoReturn

logger = logging.getLogger(__name__)

RAYLET = "RAY_RAYLET_PID"  # environment variable of Ray's workers
PERIOD = 0.5  # seconds between two looks, where the system does not tell


def watch_raylet() -> None:
    """End this process, from a thread of its own, once its node's raylet is gone."""
    raylet = int(os.environ[RAYLET])
    threading.Thread(target=_watch, args=(raylet,), name="raylet-watch", daemon=True).start()


def _watch(raylet: int) -> NoReturn:
    _wait_for_end(raylet)
    logger.error("the raylet of this process's node is gone: this process ends")
    logging.shutdown()
    os._exit(1)


def _wait_for_end(process: int) -> None:
    try:
        if sys.platform == "linux":
            ended = select.poll()
            ended.register(os.pidfd_open(process), select.POLLIN)
            ended.poll()
            return
        while True:
            os.kill(process, 0)
            time.sleep(PERIOD)
    except ProcessLookupError:
        return
