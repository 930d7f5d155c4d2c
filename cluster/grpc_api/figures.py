"""What the gRPC server has answered, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter

from cluster.metrics import Metrics


class GrpcFigures:
    """Counts answers in `squadron_grpc_responses`, by method and status; shown with the metrics of the HTTP app."""

    def __init__(self, model_name: str, metrics: Metrics) -> None:
        self._model_name = model_name
        labels = ["model_name", "method", "status"]
        self._answers = Counter(
            "squadron_grpc_responses", "gRPC answers, by method and status.", labels, registry=None
        )
        metrics.register(self._answers)

    def answered(self, method: str, status: str) -> None:
        """Count one answer. method: of our service, or "other"; status: the name of a gRPC status code."""
        self._answers.labels(model_name=self._model_name, method=method, status=status).inc()
