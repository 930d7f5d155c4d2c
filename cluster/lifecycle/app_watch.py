"""A router's picture of its app beyond its own links: what Serve says, and the starts that go on or failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.lifecycle.app_status import AppState, app_state
from cluster.lifecycle.start_register import StartRegister, living_actors
from cluster.lifecycle.starts import StartRecord

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class AppPicture:
    """What was seen at `seen` (seconds, `time.monotonic`).

    starts: records by deployment, each with whether its process lives.
    """

    app: AppState | None
    starts: dict[str, list[tuple[StartRecord, bool]]] = field(default_factory=dict)
    seen: float = 0.0


def look(app: str) -> AppPicture:
    """Ask Ray. Blocks for as long as it does not answer. Raises whatever Ray raises, or `ConnectionError`."""
    state = app_state(app)
    alive = living_actors()
    if alive is None:
        raise ConnectionError("Ray does not say which actors live")
    starts = {}
    for name in state.deployments if state is not None else ():
        records = StartRegister(app, name).of_all_versions()
        starts[name] = [(record, record.actor in alive) for record in records]
    return AppPicture(state, starts, time.monotonic())


class AppWatch:
    """Looks again and again, in a thread of its own: when Ray's head is gone its calls block for a minute.

    observe: is told what Serve says after each look, in that thread; may block as well.
    """

    def __init__(self, see: Callable[[], AppPicture], observe: Callable[[AppState], None] | None = None) -> None:
        self._see = see
        self._observe = observe
        self._picture: AppPicture | None = None
        self._thread = threading.Thread(target=self._run, name="app-watch", daemon=True)

    @property
    def picture(self) -> AppPicture | None:
        """The latest picture; None before the first."""
        return self._picture

    def start(self) -> None:
        """Begin to look, for as long as the process lives."""
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except Exception as error:  # whatever it is: without this thread /ready would tell of the past for good
                logger.warning("the app's state is not known, or not acted on: %r", error)
            time.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        picture = self._picture = self._see()
        if self._observe is not None and picture.app is not None:
            self._observe(picture.app)
