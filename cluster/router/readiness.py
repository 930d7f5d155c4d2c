"""What `/ready` says: whether requests that come now are served, and the state of every deployment and replica."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cluster.lifecycle.starts import FREE_FAILURES, StartRecord, failures_in_a_row
from cluster.router.dispatcher import Dispatcher
from cluster.router.replica_set import ReplicaView
from cluster.wire.link import Announcement

if TYPE_CHECKING:  # a front end without Ray must not wait for it
    from cluster.lifecycle.app_status import AppPicture, AppState

OLD_SECONDS = 15.0  # from which on a picture says nothing of now
IN_VAIN = 60.0  # seconds that a model counts as not ready after a request waited in vain for its first replica


def ready_body(
    dispatcher: Dispatcher, announcements: Iterable[Announcement], cold_start: bool = False
) -> dict[str, Any]:
    """Return `ready` and `replicas` of one model: those of `announcements` that take requests now.

    Lease and link of a replica end one after the other: one that holds only one of the two is on its way out.
    cold_start: whether a request is served that comes while there is no replica, after it has waited for one. Then
    the model is `cold` and all the same ready, unless a request waited in vain a moment ago.
    """
    taking = {view.replica_id for view in dispatcher.replicas() if view.ready}
    replicas = [announcement.public() for announcement in announcements if announcement.replica_id in taking]
    ready = dispatcher.ready and bool(replicas)
    if not cold_start:
        return {"ready": ready, "replicas": replicas}
    cold = not ready and not dispatcher.closing
    serves = ready or (cold and dispatcher.given_up_ago > IN_VAIN)
    return {"ready": serves, "cold": cold, "replicas": replicas}


def app_ready_body(bodies: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the body for all models, given each one's id and `ready_body`.

    The app is ready when any model is: a dead one must not have its router taken out from before the others. Models
    that are to sleep, which an operator has to wake, are listed as `asleep` where there are any.
    """
    return {
        "ready": any(body["ready"] for _, body in bodies),
        "models": {name: body["ready"] for name, body in bodies},
        "cold": [name for name, body in bodies if body.get("cold")],
        **({"asleep": asleep} if (asleep := [name for name, body in bodies if body.get("asleep")]) else {}),
        "replicas": [{**replica, "model": name} for name, body in bodies for replica in body["replicas"]],
    }


READY, ASLEEP, STALLED, DRAINING = "ready", "asleep", "stalled", "draining"
STARTING, CRASH_LOOPING, PENDING = "starting", "crash-looping", "pending"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica. `seconds`: in the state or phase; of a stalled one since it moved. `next_try`: seconds until then.

    pending: Serve wants it, and there is no process of it yet. reason: why the last start failed. tries: starts that
    failed in a row. share: of the phase that is done, 0 to 1, 0 where that is not known. The figures are those of
    its last report.
    """

    replica_id: str
    state: str
    seconds: float | None = None
    phase: str = ""
    reason: str = ""
    tries: int = 0
    next_try: float | None = None
    requests: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    share: float = 0.0
    sleep_level: int = 0

    def public(self) -> dict[str, Any]:
        """Return the fields that say something, for JSON."""
        fields = {
            "id": self.replica_id,
            "state": self.state,
            "seconds": None if self.seconds is None else round(self.seconds, 1),
            "phase": self.phase,
            "share": round(self.share, 3) or None,
            "sleep_level": self.sleep_level or None,
            "reason": self.reason,
            "failed_starts": self.tries or None,
            "next_try": None if self.next_try is None else round(self.next_try, 1),
        }
        shown = {name: value for name, value in fields.items() if value not in (None, "")}
        if self.state in (READY, ASLEEP, STALLED, DRAINING):
            figures = {"running": self.requests, "waiting": self.waiting, "kv_usage": round(self.kv_usage, 4)}
            shown |= figures
        return shown


def replica_states(
    views: Iterable[ReplicaView],
    starts: Sequence[tuple[StartRecord, bool]],
    present: int | None,
    now: float,
    unlinked: Mapping[str, str] | None = None,
) -> list[ReplicaState]:
    """Return the replicas, those that serve first.

    starts: records with whether the process lives. present: how many Serve counts that serve or will; None = unknown.
    now: seconds since the epoch. unlinked: why the router has no link to some that it knows of, by id.
    """
    linked = [_linked(view) for view in views]
    known = {state.replica_id for state in linked}
    alive = [record for record, lives in starts if lives and record.replica_id not in known]
    why = unlinked or {}
    records = sorted(alive, key=lambda record: record.began)
    coming = [_coming(record, now, why.get(record.replica_id, "")) for record in records]
    missing = 0 if present is None else present - len(coming) - sum(state.state != DRAINING for state in linked)
    records = [record for record, _ in starts]
    failures, reason = failures_in_a_row(records, {record.actor for record, lives in starts if lives}, now)
    if failures < FREE_FAILURES:
        failures, reason = 0, ""
    pending = [ReplicaState("", PENDING, reason=reason, tries=failures) for _ in range(missing)]
    return linked + coming + pending


def _linked(view: ReplicaView) -> ReplicaState:
    state = DRAINING if view.draining else ASLEEP if view.asleep else READY if view.ready else STALLED
    load = view.load
    seconds = view.age if state == STALLED else None
    return ReplicaState(
        view.replica_id,
        state,
        seconds,
        requests=load.num_running,
        waiting=load.num_waiting,
        kv_usage=load.kv_usage,
        sleep_level=view.asleep,
    )


def _coming(record: StartRecord, now: float, unlinked: str) -> ReplicaState:
    seconds = max(0.0, now - record.since)
    if record.state == "waiting":
        wait = max(0.0, record.next_try - now)
        return ReplicaState(record.replica_id, CRASH_LOOPING, seconds, "", record.last_reason, record.failures, wait)
    if record.state == "failed":
        return ReplicaState(record.replica_id, CRASH_LOOPING, seconds, "", record.reason, record.failures + 1)
    # One that is ready but has no link: routers have yet to find it.
    phase = record.phase or ("linking" if record.state == "ready" else "")
    reason = unlinked or record.last_reason
    return ReplicaState(record.replica_id, STARTING, seconds, phase, reason, record.failures, share=record.share)


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

    views: of each model. notice: of an update that failed before, which is shown unless one has failed now.
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
