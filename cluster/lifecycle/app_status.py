"""What Ray Serve says of an app, through `serve.status()` alone, and a thread of each router that keeps asking."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ray import serve
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from cluster.errors import find_start_failure
from cluster.lifecycle.control_store import StartRegister, living_actors
from cluster.lifecycle.starts import MAX_REASON, StartRecord

FAILED = "DEPLOY_FAILED"
RUNNING = "RUNNING"
DELETING = "DELETING"
# Serve calls an update failed as soon as a copy of the new version dies, and goes on with it: then the trigger is
# this, and the message lacks the words with which it gives an update up.
# Source: ray/serve/_private/deployment_state.py.
COPY_LOST = "HEALTH_CHECK_FAILED"
GIVEN_UP = "The update is stopped"
logger = logging.getLogger(__name__)
PROBE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """One deployment. `counts`: copies by Serve's state (STARTING, RUNNING, STOPPING, ...). `reason`: one line.

    goes_on: whether Serve goes on with an update whose status is that it failed.
    """

    status: str
    counts: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    goes_on: bool = False

    @property
    def running(self) -> int:
        """Copies that serve."""
        return self.counts.get("RUNNING", 0)

    @property
    def present(self) -> int:
        """Copies that serve or will."""
        return sum(count for state, count in self.counts.items() if state != "STOPPING")

    @property
    def update_failed(self) -> bool:
        """Whether Serve gave up starting the version that was deployed last."""
        return self.status == FAILED and not self.goes_on


@dataclass(frozen=True, slots=True)
class AppState:
    """One app and its deployments by name. `status`: DEPLOYING, RUNNING, DEPLOY_FAILED, UNHEALTHY or DELETING.

    deployed_at: seconds since the epoch at which a config file was applied to it last; 0 where none was.
    """

    status: str
    deployments: dict[str, DeploymentState] = field(default_factory=dict)
    reason: str = ""
    deployed_at: float = 0.0

    @property
    def update_failed(self) -> bool:
        """Whether Serve gave up the version that was deployed last, or could not even build it."""
        failed = [one for one in self.deployments.values() if one.status == FAILED]
        return self.status == FAILED and (not failed or any(one.update_failed for one in failed))

    @property
    def failure(self) -> str:
        """Why the last update failed: the first deployment's reason, or that of the app."""
        reasons = [one.reason for one in self.deployments.values() if one.update_failed and one.reason]
        return (reasons or [self.reason])[0] or "Serve gives no reason"


def app_state(name: str) -> AppState | None:
    """Ask Serve's controller; None if it has no such app. Blocks for as long as the controller does not answer."""
    overview = serve.status().applications.get(name)
    return None if overview is None else read_overview(overview)


def read_overview(overview: ApplicationStatusOverview) -> AppState:
    """Return the part of Serve's overview that is shown."""
    deployments = {name: _deployment(one) for name, one in overview.deployments.items()}
    reason = one_line(overview.message)
    return AppState(overview.status.value, deployments, reason, overview.last_deployed_time_s)


def _deployment(overview: DeploymentStatusOverview) -> DeploymentState:
    # Serve hands out plain strings where its types say members of an Enum whose members are strings.
    counts = {str.__str__(state): count for state, count in overview.replica_states.items() if count}
    goes_on = overview.status_trigger.value == COPY_LOST and GIVEN_UP not in overview.message
    return DeploymentState(overview.status.value, counts, one_line(overview.message), goes_on)


def one_line(message: str) -> str:
    """Return what a status message comes to: our own sentence in it, or its first line and the end of a traceback."""
    failure = find_start_failure(message)
    if failure is not None:
        return failure.message[:MAX_REASON]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[0][:MAX_REASON] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"[:MAX_REASON]


@dataclass(frozen=True, slots=True)
class AppPicture:
    """What was seen at `seen` (seconds, `time.monotonic`).

    starts: records by deployment, each with whether its process lives.
    """

    app: AppState | None
    starts: dict[str, list[tuple[StartRecord, bool]]] = field(default_factory=dict)
    seen: float = 0.0


def probe_app(app: str) -> AppPicture:
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
    """Probes again and again, in a thread of its own: when Ray's head is gone its calls block for a minute.

    observe: called with Serve's status after each probe, in that thread; may block as well.
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
        """Begin to probe, for as long as the process lives."""
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._probe()
            except Exception as error:  # whatever it is: without this thread /ready would show the past for good
                logger.warning("the app's state is not known, or not acted on: %r", error)
            time.sleep(PROBE_SECONDS)

    def _probe(self) -> None:
        picture = self._picture = self._see()
        if self._observe is not None and picture.app is not None:
            self._observe(picture.app)
