"""When an app goes back to the version that served before an update that failed. Decisions only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.life.app_status import FAILED, RUNNING, AppState

logger = logging.getLogger(__name__)

CONFIRMED = 2  # looks in a row that must have shown the failure
ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Version:
    """What to deploy to have a version again. config: the app's part of a Serve config file, None = it had none."""

    route_prefix: str | None
    config: dict[str, Any] | None = None


class Deployed(Protocol):
    """The app as Serve knows it (`cluster.life.deployed_app.DeployedApp`)."""

    def version(self) -> Version | None:
        """Return the version that serves; None if the copy that asks does not belong to it any more."""
        ...

    def restore(self, version: Version) -> bool:
        """Deploy `version`, unless the app has not failed (any more). Return whether it was deployed."""
        ...


class Rollback:
    """A router's watch over the version of the app that it belongs to.

    A version is good once the app was whole with it. Where a later update fails, each router of the good version
    deploys it again, which is the same deed however many do it. Before the next time the app must have been whole
    again, so that two versions which both fail do not take turns for ever.

    notice: what became of the last update that failed, "" where there was none. clock: seconds since the epoch.
    """

    def __init__(self, deployed: Deployed, clock: Callable[[], float] = time.time) -> None:
        self.notice = ""
        self._deployed = deployed
        self._clock = clock
        self._good: Version | None = None
        self._seen = ("", 0.0)
        self._failed_looks = 0
        self._reason = ""

    def look(self, state: AppState) -> None:
        """Take notice of what Serve says now, and act on it. Blocks for as long as Serve does not answer."""
        if state.status == RUNNING:
            self._serves(state)
        elif state.status == FAILED and self._good is not None:
            self._fails(state, self._good)
        self._seen = (state.status, state.deployed_at)

    def _serves(self, state: AppState) -> None:
        if self._seen != (RUNNING, state.deployed_at):
            self._good = self._deployed.version()
        if self._reason and self._good is not None:
            self.notice = f"an update failed and was rolled back at {self._time()}: {self._reason}"
        self._reason, self._failed_looks = "", 0

    def _fails(self, state: AppState, good: Version) -> None:
        if self._seen != (FAILED, state.deployed_at):
            self._failed_looks = 0
        self._failed_looks += 1
        self._reason = state.failure
        if self._failed_looks < CONFIRMED:
            return
        if self._failed_looks == CONFIRMED + ATTEMPTS - 1:
            self._good = None
        if self._deployed.restore(good):
            self._good = None
            logger.error("the update failed and is rolled back: %s", self._reason)

    def _time(self) -> str:
        return time.strftime("%H:%M:%S UTC", time.gmtime(self._clock()))
