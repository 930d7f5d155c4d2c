"""What one look of `squadron top` shows. Frozen, so that it can go to a terminal, to JSON or to a test alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deploy.status.report import ReplicaLine, Report
from deploy.top.quantile import Percentiles


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """One model, over all routers and replicas. Rates are a second; latencies are of the last interval, None = none.

    requests: that ended well; failed: that ended in an error. refused: turned away at the door. live: requests that
    have not ended; queued: those of them that wait in routers. cache_hits: share of prompt tokens found in the prefix
    cache, of those looked up. moved: requests that migrated in the interval.
    """

    model: str
    requests: float
    failed: float
    refused: float
    prompt_tokens: float
    generation_tokens: float
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    live: int
    queued: int
    cache_hits: float | None
    moved: int


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """One replica: its state and load as /ready tells them, and tokens a second."""

    line: ReplicaLine
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    cache_hits: float | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """One tenant, over all models. devices: how many it kept busy on average; the idle ones have the name ""."""

    tenant: str
    requests: float = 0.0
    refused: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    queued: int = 0
    devices: float = 0.0


@dataclass(frozen=True, slots=True)
class Picture:
    """One look. seconds: that the rates are taken over, None before the second look. heard: routers that told."""

    report: Report
    seconds: float | None = None
    heard: int = 0
    models: tuple[ModelFigures, ...] = ()
    replicas: tuple[ReplicaFigures, ...] = ()
    tenants: tuple[TenantFigures, ...] = ()

    def public(self) -> Mapping[str, Any]:
        """Return the picture for JSON."""
        return asdict(self) | {"report": self.report.public()}
