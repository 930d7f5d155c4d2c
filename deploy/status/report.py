"""What a server's /ready and /metrics come to. Pure: bodies in, a report out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

WAITING = "squadron_tenant_requests_queued"
MIGRATIONS = "squadron_migrations_total"
FOR_ADMINS = "this key is shown no more than whether the server is ready: give that of an admin, or of --metrics-key"


class Condition(Enum):
    """How a server is; the value is the exit code of `squadron status`."""

    READY = 0
    NOT_READY = 1
    UNREACHABLE = 2


@dataclass(frozen=True, slots=True)
class ReplicaLine:
    """One replica, as in `states` of /ready. kv_usage: 0 to 1. Figures are None where it does not serve."""

    name: str
    state: str
    model: str = ""
    phase: str = ""
    seconds: float | None = None
    reason: str = ""
    failed_starts: int = 0
    next_try: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """One server. `notice`: what is wrong, in a sentence. queued: requests that wait in the router that answered."""

    address: str
    condition: Condition
    models: tuple[str, ...] = ()
    version: str = ""
    app: str = ""
    app_status: str = ""
    routers: int | None = None
    queued: int | None = None
    migrations: int | None = None
    replicas: tuple[ReplicaLine, ...] = ()
    notice: str = ""
    deployments: dict[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether the server told of itself, to this key."""
        return bool(self.app or self.version or self.replicas)

    @property
    def running(self) -> int:
        """Sequences that run on all replicas."""
        return sum(replica.running or 0 for replica in self.replicas)

    @property
    def waiting(self) -> int:
        """Sequences that wait on all replicas."""
        return sum(replica.waiting or 0 for replica in self.replicas)

    def public(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return asdict(self) | {"condition": self.condition.name.lower()}


def read_report(address: str, ready: Mapping[str, Any], metrics: str) -> Report:
    """Return the report of a server that answered with these bodies; `metrics` may be empty."""
    condition = Condition.READY if ready.get("ready") else Condition.NOT_READY
    if "states" not in ready and "replicas" not in ready:
        return Report(address, condition, notice=FOR_ADMINS)
    app = ready.get("app") or {}
    deployments = dict(ready.get("deployments") or {})
    figures = _sums(metrics)
    return Report(
        address=address,
        condition=condition,
        models=_models(ready),
        version=str(ready.get("version", "")),
        app=str(app.get("name", "")),
        app_status=str(app.get("status", "")),
        routers=_routers(deployments),
        queued=figures.get(WAITING),
        migrations=figures.get(MIGRATIONS),
        replicas=tuple(_line(state) for state in ready.get("states", [])),
        notice=str(ready.get("notice") or app.get("reason") or ""),
        deployments=deployments,
    )


def _models(ready: Mapping[str, Any]) -> tuple[str, ...]:
    models = ready.get("models")
    return tuple(str(model) for model in models) if models else (str(ready.get("model", "")),)


def _routers(deployments: Mapping[str, Any]) -> int | None:
    router = deployments.get("Router")
    return None if router is None else int(router.get("counts", {}).get("RUNNING", 0))


def _line(state: Mapping[str, Any]) -> ReplicaLine:
    known = {name: state[name] for name in ReplicaLine.__slots__ if name in state and name != "name"}
    return ReplicaLine(name=str(state.get("id", "")), **known)


def _sums(metrics: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    # The parser takes milliseconds for each of the many families: those who look five times a second feel it.
    wanted = [line for line in metrics.splitlines() if line.startswith((WAITING, MIGRATIONS))]
    for family in text_string_to_metric_families("\n".join(wanted)):
        for sample in family.samples:
            if sample.name in (WAITING, MIGRATIONS):
                sums[sample.name] = sums.get(sample.name, 0) + int(sample.value)
    return sums
