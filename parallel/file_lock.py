"""A lock between processes of one machine, which ends with the process that holds it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_SECONDS = 0.02


@contextmanager
def locked(file: Path, timeout: float) -> Iterator[None]:
    """Hold the lock on `file`, which is made where it is missing. timeout: seconds to wait for it.

    Raises `TimeoutError` when another process holds it for longer, and `OSError` where there can be no such file.
    """
    with file.open("w") as lock:
        until = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"{file} is held by another process") from None
                time.sleep(LOOK_SECONDS)
        yield
