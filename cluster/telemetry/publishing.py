"""The thread that publishes a process's figures, some times a minute and beside all that is hot."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol

from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that an event loop may be held up
Snapshot = Callable[[], Iterable[Metric]]


class Publisher(Protocol):
    """Where figures go (`cluster.telemetry.ray_publisher`)."""

    def publish(self, metrics: Iterable[Metric]) -> None:
        """Take the present figures."""


class Publishing:
    """Publishes what `snapshot` returns, at once and every `period` seconds until stopped, or the process ends.

    What keeps it from that is logged when it begins and when it is over, not at every round between.
    """

    def __init__(self, snapshot: Snapshot, publisher: Publisher, period: float) -> None:
        self._snapshot = snapshot
        self._publisher = publisher
        self._period = period
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="figures", daemon=True)

    def start(self) -> None:
        """Begin. Can be called once."""
        self._thread.start()

    def stop(self) -> None:
        """End after what is being published."""
        self._stop.set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._publish()
                self._stop.wait(self._period)
        except LoopGoneError:
            return

    def _publish(self) -> None:
        try:
            self._publisher.publish(self._snapshot())
        except LoopGoneError:
            raise
        except TimeoutError:
            self._failed("figures are not published: the event loop is held up", traceback=False)
        except Exception:
            # Figures must not end what they are about; the next round may do better.
            self._failed("figures are not published", traceback=True)
        else:
            if self._failing:
                logger.info("figures are published again")
            self._failing = False

    def _failed(self, message: str, traceback: bool) -> None:
        level = logging.DEBUG if self._failing else logging.ERROR if traceback else logging.WARNING
        logger.log(level, message, exc_info=traceback)
        self._failing = True


class LoopGoneError(Exception):
    """The event loop whose figures are wanted is closed."""


def on_loop(collect: Snapshot, patience: float = PATIENCE) -> Snapshot:
    """Return a snapshot for another thread of what `collect` yields on the running event loop.

    It raises `TimeoutError` where the loop is held up for `patience` seconds, `LoopGoneError` where it is closed.
    """
    loop = asyncio.get_running_loop()

    def snapshot() -> list[Metric]:
        found: Future[list[Metric]] = Future()
        try:
            loop.call_soon_threadsafe(_fill, found, collect)
        except RuntimeError as error:
            raise LoopGoneError(str(error)) from error
        return found.result(patience)

    return snapshot


def _fill(found: Future[list[Metric]], collect: Snapshot) -> None:
    try:
        found.set_result(list(collect()))
    except Exception as error:
        found.set_exception(error)
