"""What is counted of gRPC. Imports nothing of gRPC itself, for the figures are there where it is off, too."""

from __future__ import annotations

from cluster.telemetry.metrics import Metrics
from cluster.telemetry.samples import live_counter


class GrpcMetrics:
    """Counts answers in `squadron_grpc_responses`, by model, method and status; shown with the metrics of the app."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._answers = live_counter("grpc_responses", metrics.registry)

    def answered(self, method: str, status: str, model: str = "") -> None:
        """Count one answer. method: of our service, or "other"; status: the name of a gRPC status code."""
        self._answers.labels(model_name=self._metrics.label(model), method=method, status=status).inc()
