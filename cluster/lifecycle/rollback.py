"""When an app goes back to the version that served before an update that failed. Decisions only."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from cluster.lifecycle.app_status import DELETING, RUNNING, AppState
from engine.errors import SquadronError

logger = logging.getLogger(__name__)

CONFIRMED = 2  # looks in a row that must have shown the failure
ATTEMPTS = 5  # that were refused
ROLLBACK = "rollback"  # the setting `update_failure_action`
REFRESH = 10.0  # seconds between two signs of life of the app
STALE = 60.0  # seconds without one after which a version belongs to an app that was deleted


class GoodVersion(msgspec.Struct, frozen=True):
    """A version with which an app was whole, as it is deployed again.

    action: what it wants done when an update from it fails. config: the app's part of a Serve config file; None = it
    had none, and is built of `args` with `versions` of its deployments, in a process with `runtime_env`.
    """

    route_prefix: str | None
    action: str = ROLLBACK
    config: dict[str, Any] | None = None
    args: dict[str, Any] = {}
    versions: dict[str, str] = {}
    runtime_env: dict[str, Any] = {}

    def as_kept(self) -> GoodVersion:
        """Return it as it is read back: tuples are lists then."""
        return msgspec.json.decode(msgspec.json.encode(self), type=GoodVersion)


class Undone(msgspec.Struct, frozen=True):
    """An update that was undone: why, and at which second since the epoch. whole: whether the app was whole again."""

    reason: str
    at: float
    whole: bool = False


class Deployed(Protocol):
    """The app as Serve knows it (`cluster.lifecycle.deployed_app.DeployedApp`)."""

    def version(self) -> GoodVersion | None:
        """Return the version that serves; None if the copy that asks does not belong to it (any more)."""
        ...

    def restore(self, version: GoodVersion) -> bool:
        """Deploy `version`, unless the app has not failed (any more). Return whether it was deployed."""
        ...


class Memory(Protocol):
    """What outlives every copy of the app (`cluster.lifecycle.app_memory.AppMemory`)."""

    good: GoodVersion | None
    undone: Undone | None
    seen: float

    def forget(self) -> None:
        """Forget all of it."""


class Rollback:
    """A router's watch over its app: it remembers what was whole and deploys it again where a later version fails.

    An update replaces routers while its replicas still fail to start, so the router that undoes an update may be one
    of the failed version. Where several do, it is the same deed. Before the next time the app must have been whole
    again, so that two versions which both fail do not take turns for ever.

    notice: what became of the last update, if it failed. time_of_day: seconds since the epoch, which may jump; a
    router that knows the app goes by `clock`, which nobody sets.
    """

    def __init__(
        self,
        deployed: Deployed,
        memory: Memory,
        time_of_day: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notice = ""
        self._deployed = deployed
        self._memory = memory
        self._time_of_day = time_of_day
        self._clock = clock
        self._belongs = False  # whether this router belongs to the version that is whole
        self._before = ("", 0.0)
        self._refreshed = -math.inf
        self._failed_looks = 0
        self._refused = 0

    def look(self, state: AppState) -> None:
        """Take notice of what Serve says now, and act on it. Blocks for as long as Serve does not answer."""
        now = (state.status, state.deployed_at)
        if state.status == DELETING:
            self._memory.forget()
            self._refreshed = -math.inf
            return
        if state.status == RUNNING and now != self._before:
            self._is_whole()
        self._refresh()
        self._failed_looks = self._failed_looks + 1 if state.update_failed else 0
        if self._failed_looks >= CONFIRMED:
            self._has_failed(state)
        self._before = now

    def _is_whole(self) -> None:
        self._refused = 0
        version = self._deployed.version()
        self._belongs = version is not None
        if version is None:
            return
        undone = self._memory.undone
        if version.as_kept() != self._memory.good:
            self._memory.good, self._memory.undone = version, None
        elif undone is not None:
            self._memory.undone = msgspec.structs.replace(undone, whole=True)
        undone = self._memory.undone
        self.notice = "" if undone is None else _told(undone)

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._refreshed >= REFRESH and (self._belongs or self._is_fresh()):
            self._memory.seen, self._refreshed = self._time_of_day(), now

    def _is_fresh(self) -> bool:
        known = self._clock() - self._refreshed < STALE
        return known or abs(self._time_of_day() - self._memory.seen) < STALE

    def _has_failed(self, state: AppState) -> None:
        good, undone = self._memory.good, self._memory.undone
        if good is None or good.action != ROLLBACK or not self._is_fresh():
            return
        if self._refused >= ATTEMPTS or (undone is not None and not undone.whole):
            return
        if self._restored(good):
            logger.error("the update failed and is rolled back: %s", state.failure)
            self._memory.undone = Undone(state.failure, self._time_of_day())
        else:
            self._refused += 1

    def _restored(self, good: GoodVersion) -> bool:
        try:
            return self._deployed.restore(good)
        except SquadronError as error:
            logger.error("the update failed, and the version before it cannot be built again: %s", error)
            return False


def _told(undone: Undone) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(undone.at))
    return f"an update failed and was rolled back at {at}: {undone.reason}"
