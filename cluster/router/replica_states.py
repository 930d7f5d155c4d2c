"""Every replica of an app in one list: those that serve, and those that start, fail to, or leave. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.lifecycle.starts import FREE_FAILURES, StartRecord, failures_in_a_row
from cluster.router.fleet import ReplicaView

READY, STALLED, DRAINING = "ready", "stalled", "draining"
STARTING, CRASH_LOOPING, PENDING = "starting", "crash-looping", "pending"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica. `seconds`: in the state or phase; of a stalled one since it moved. `next_try`: seconds until then.

    pending: Serve wants it, and there is no process of it yet. reason: why the last start failed. tries: starts that
    failed in a row. The figures are those of its last report.
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

    def public(self) -> dict[str, Any]:
        """Return the fields that say something, for JSON."""
        fields = {
            "id": self.replica_id,
            "state": self.state,
            "seconds": None if self.seconds is None else round(self.seconds, 1),
            "phase": self.phase,
            "reason": self.reason,
            "failed_starts": self.tries or None,
            "next_try": None if self.next_try is None else round(self.next_try, 1),
        }
        shown = {name: value for name, value in fields.items() if value not in (None, "")}
        if self.state in (READY, STALLED, DRAINING):
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
    state = DRAINING if view.draining else READY if view.ready else STALLED
    load = view.load
    seconds = view.age if state == STALLED else None
    return ReplicaState(
        view.replica_id, state, seconds, requests=load.num_running, waiting=load.num_waiting, kv_usage=load.kv_usage
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
    return ReplicaState(record.replica_id, STARTING, seconds, phase, reason, record.failures)
