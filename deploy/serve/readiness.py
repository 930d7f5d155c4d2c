"""Watches an app come up through Serve's status and the router's /ready, and says why when it does not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatus

from cluster.app import GATEWAYS
from cluster.errors import StartFailure, find_start_failure
from deploy.cli.client import client_for
from deploy.serve.environment import Environment
from engine.errors import SquadronError, flag

POLL_SECONDS = 0.2
NOTE_SECONDS = 30.0
FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)


class StartError(SquadronError):
    """The app did not come up; one sentence says why."""


class Readiness:
    """Waits for the ready replicas of the app `name` whose HTTP endpoint is at `url`.

    deployed: what /ready says of this app alone. wanted: id of each model -> how many there should be.
    quiet: seconds without any progress after which the start has failed.
    note: called now and then with what Serve waits for, when it takes long. show: called with the `states` of /ready.
    """

    def __init__(
        self,
        name: str,
        url: str,
        key: str | None,
        deployed: str,
        wanted: Mapping[str, int],
        note: Callable[[str], None],
        show: Callable[[Sequence[Mapping[str, Any]]], None],
        quiet: float,
    ) -> None:
        self._client = client_for(url, key)
        self._name = name
        self._deployed = deployed
        self._wanted = wanted
        self._note = note
        self._show = show
        self._quiet = quiet
        self._progress: object = None
        self._moved = time.monotonic()

    def wait(self) -> list[dict[str, Any]]:
        """Return what /ready says of each replica once all are ready, and gateways. Raises `StartError`."""
        next_note = time.monotonic() + NOTE_SECONDS
        with self._client:
            while True:
                status = serve.status().applications.get(self._name)
                if status is None:
                    raise StartError(f"the app {self._name} was deleted while it started")
                refuse_failed(status)
                bodies = self._ready_replicas()
                missing = Counter(self._wanted) - Counter([str(body.get("model")) for body in bodies])
                if not missing and gateways_serve(status):
                    return bodies
                if time.monotonic() - self._moved > self._quiet:
                    raise StartError(f"nothing has moved for {self._quiet:g} s: {_pending(status)}")
                if time.monotonic() > next_note:
                    self._note(_pending(status))
                    next_note += NOTE_SECONDS
                time.sleep(POLL_SECONDS)

    def _ready_replicas(self) -> list[dict[str, Any]]:
        try:
            answer = self._client.get("/ready")
            body = answer.json()
        except (httpx.HTTPError, ValueError):
            return []  # the port is closed, or Serve's proxy does not know the app yet
        where = f"another server answers at {self._client.base_url}"
        if answer.status_code == 401:
            raise StartError(f"{where}: it refuses the API key; give another --port")
        if not isinstance(body, dict):
            return []
        if "replicas" in body and body.get("deployed") != self._deployed:
            raise StartError(f"{where}; give another --port")
        states = body.get("states", ())
        self._show(states)
        # All but the seconds, which pass in any case.
        progress = [(state.get("id"), state.get("phase"), state.get("share")) for state in states]
        if progress != self._progress:
            self._progress, self._moved = progress, time.monotonic()
        if not body.get("ready"):
            return []
        if "replicas" not in body:
            raise StartError(
                "the key file lists the metrics key without scrape: true, so replicas are not shown to it"
            )
        return [replica for replica in body["replicas"] if replica.get("phases")]


def refuse_failed(status: ApplicationStatusOverview) -> None:
    """Raise `StartError` when a deployment gave its reason for not starting, or Serve gave up."""
    messages = [status.message, *(deployment.message for deployment in status.deployments.values())]
    for message in messages:
        failure = find_start_failure(message)
        if failure is not None:
            raise StartError(_sentence(failure))
    if status.status in FAILED:
        raise StartError(f"{_last_line(messages)} (Ray's logs have more: {Environment.read().ray_logs}/serve)")


def gateways_serve(status: ApplicationStatusOverview) -> bool:
    """Whether all gateways take connections: those of gRPC alone are not asked for /ready."""
    gateways = status.deployments.get(GATEWAYS)
    return gateways is None or gateways.status is DeploymentStatus.HEALTHY


def _sentence(failure: StartFailure) -> str:
    if not failure.flag or failure.flag in failure.message:
        return failure.message
    return f"{failure.message}; set {flag(failure.flag)}"


def _last_line(messages: list[str]) -> str:
    """Return the last line of the longest message: a traceback ends with the error itself."""
    lines = [line.strip() for line in max(messages, key=len).splitlines() if line.strip()]
    return lines[-1] if lines else "Serve gave up without a reason"


def _pending(status: ApplicationStatusOverview) -> str:
    texts = (f"{name}: {d.message.splitlines()[0]}" for name, d in status.deployments.items() if d.message)
    return next(texts, f"the app is {status.status.value}")
