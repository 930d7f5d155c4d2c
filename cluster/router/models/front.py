"""What a front end holds of one model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cluster.admission.fair_gate import FairGate
from cluster.openai.served_model import ServedModel
from cluster.router.fleet import ReplicaView
from cluster.router.inquiries import Explanation, nothing_known
from cluster.telemetry.metrics import ModelMetrics


@dataclass(frozen=True, slots=True)
class ModelFront:
    """One model as the ingresses see it.

    gate: the fair gate, through which its tokens come. metrics: under its name. ready: whether requests that come now
    are served. replicas: a snapshot. explain: tells what a request waited for, by the name that its client knows, and
    the tenant whose it must be (None = anybody's).
    """

    model: ServedModel
    gate: FairGate
    metrics: ModelMetrics
    ready: Callable[[], bool]
    replicas: Callable[[], Sequence[ReplicaView]] = list
    explain: Callable[[str, str | None], Awaitable[Explanation]] = nothing_known

    @property
    def model_id(self) -> str:
        """The id that answers and figures show."""
        return self.model.model_id
