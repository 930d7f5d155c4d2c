"""What `/ready` tells of the app beside whether it is ready: its deployments and every replica's state."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from cluster.lifecycle.app_status import AppState
from cluster.lifecycle.app_watch import AppPicture
from cluster.router.fleet import ReplicaView
from cluster.router.replica_states import replica_states

OLD_SECONDS = 15.0  # from which on a picture says nothing of now


@dataclass(frozen=True, slots=True)
class ModelViews:
    """What a router sees of one model's replicas. `deployment`: what Serve calls these.

    unlinked: why it has no link to some that it knows of, by id.
    """

    model: str
    deployment: str
    replicas: Sequence[ReplicaView]
    unlinked: Mapping[str, str] = field(default_factory=dict)


def app_body(name: str, picture: AppPicture | None, views: Iterable[ModelViews], notice: str = "") -> dict[str, Any]:
    """Return `version`, `app`, `deployments`, `states`, and a `notice` where an update failed, of the app `name`.

    views: of each model. notice: of an update that failed before, which is told unless one has failed now.
    """
    seen = fresh(picture, time.monotonic())
    app = None if seen is None else seen.app
    states = []
    for one in views:
        starts = [] if seen is None else seen.starts.get(one.deployment, [])
        known = None if app is None else app.deployments.get(one.deployment)
        present = None if known is None else known.present
        found = replica_states(one.replicas, starts, present, time.time(), one.unlinked)
        states += [state.public() | {"model": one.model} for state in found]
    notice = _notice(app) or notice
    return {
        "version": version("squadron"),
        "app": _app(name, app),
        "deployments": {} if app is None else _deployments(app),
        "states": states,
    } | ({"notice": notice} if notice else {})


def fresh(picture: AppPicture | None, now: float) -> AppPicture | None:
    """Return the picture, if it still says something of now (seconds, `time.monotonic`)."""
    return picture if picture is not None and now - picture.seen < OLD_SECONDS else None


def _app(name: str, app: AppState | None) -> dict[str, Any]:
    if app is None:
        return {"name": name, "status": "UNKNOWN", "reason": "Ray has not been reached lately"}
    return {"name": name, "status": app.status, "reason": app.reason}


def _deployments(app: AppState) -> dict[str, Any]:
    return {
        name: {"status": one.status, "counts": one.counts, "reason": one.reason}
        for name, one in app.deployments.items()
    }


def _notice(app: AppState | None) -> str:
    failed = [] if app is None else [(name, one) for name, one in app.deployments.items() if one.update_failed]
    if not failed:
        return ""
    name, one = failed[0]
    reason = one.reason or "Serve gives no reason"
    if not one.running:
        return f"{name} does not start: {reason}"
    return f"the last update of {name} failed, copies of the version before it serve ({one.running}): {reason}"
