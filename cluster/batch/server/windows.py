"""How much of its 24 hours each batch has used, by a clock that nobody sets.

A time of day may jump: it is corrected, or a machine was suspended. So while a runner lives it counts what passes; of
the time between two runners the time of day tells, which may be wrong, so that it leaves a batch `GRACE` at least.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from cluster.batch.server.objects import BatchRecord
from cluster.batch.server.root import Root

logger = logging.getLogger(__name__)

USED = "used.json"
KEEP_SECONDS = 60.0  # between two times that it is kept
GRACE = 3600.0  # seconds that the time of day cannot take from a batch


class Used(msgspec.Struct, frozen=True):
    """at: seconds since 1970. seconds: that each batch had used by then."""

    at: float
    seconds: dict[str, float]


class Windows:
    """All batches that have not ended. Methods block. May be used from any thread.

    clock: never set, of this process. time_of_day: seconds since 1970.
    """

    def __init__(
        self,
        root: Root,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._clock = clock
        self._time_of_day = time_of_day
        self._lock = threading.Lock()
        self._before: Used | None = None  # what was kept last, by this runner or one before
        self._began: dict[str, float] = {}
        self._looked: float | None = None
        self._kept_at = -KEEP_SECONDS

    def look(self, unended: Iterable[BatchRecord]) -> None:
        """Take notice of all batches that have not ended; now and then keep what they have used."""
        with self._lock:
            self._began = {one.id: self._begin(one) for one in unended}
            self._looked = now = self._clock()
            if now - self._kept_at < KEEP_SECONDS:
                return
            self._kept_at = now
            used = self._before = Used(self._time_of_day(), {one: now - began for one, began in self._began.items()})
        try:
            self._root.write(USED, msgspec.json.encode(used))
        except Exception as error:  # whatever a library for URLs raises
            logger.warning("what batches have used of their time is not kept, and is the next time: %s", error)

    def is_over(self, record: BatchRecord) -> bool:
        """Whether a batch has used all of its time."""
        with self._lock:
            began = self._began[record.id] = self._begin(record)
        return self._clock() - began >= record.expires_at - record.created_at

    def _begin(self, record: BatchRecord) -> float:
        """Return when, by our clock, a batch began its time."""
        if record.id in self._began:
            return self._began[record.id]
        if self._before is None:
            self._before = self._read()
        if record.id in self._before.seconds:
            used, since = self._before.seconds[record.id], self._before.at
        elif self._looked is not None:
            return self._looked  # it was made since
        else:
            used, since = 0.0, record.created_at
        between = max(0.0, self._time_of_day() - since)
        most = record.expires_at - record.created_at - GRACE
        return self._clock() - max(used, min(used + between, most))

    def _read(self) -> Used:
        data = self._root.read(USED)
        try:
            return Used(0.0, {}) if data is None else msgspec.json.decode(data, type=Used)
        except msgspec.MsgspecError as error:
            logger.error("%s is damaged (%s): the time of day tells what batches have used", USED, error)
            return Used(0.0, {})
