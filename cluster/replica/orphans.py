"""Processes that end with their node. Ray takes up to half a minute to end those of a dead raylet; they serve on.

A process whose raylet is gone is not managed any more: Serve has given it up and starts another in its place.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import NoReturn

logger = logging.getLogger(__name__)

PERIOD = 0.5  # seconds between two looks


def watch_parent() -> None:
    """End this process, from a thread of its own, once the process that started it is gone."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(PERIOD)
    logger.error("the process that started this one (the node's raylet) is gone: this one ends")
    logging.shutdown()
    os._exit(1)
