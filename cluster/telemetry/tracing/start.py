"""Switches tracing on where the configuration asks for it; else nothing of it is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.config import ClusterConfig
from engine.errors import ConfigError

if TYPE_CHECKING:
    from cluster.http.tracing import RouterTracing
    from cluster.telemetry.tracing.engine_spans import EngineSpans

EXTRA = "pip install '.[otel]' in Squadron's folder"


def router_tracing(config: ClusterConfig, router_id: str) -> RouterTracing | None:
    """Return what traces the calls of a router, None where tracing is off.

    Raises `ConfigError` where a package or the file's folder is missing.
    """
    if config.otlp_traces_endpoint is None:
        return None
    with _explained(config.otlp_traces_endpoint):
        from cluster.http.tracing import RouterTracing
        from cluster.telemetry.tracing.provider import exporter_to, tracing_to

        return RouterTracing(tracing_to(exporter_to(config.otlp_traces_endpoint), "router", router_id))


def replica_spans(config: ClusterConfig, replica_id: str) -> EngineSpans | None:
    """Return what makes the spans of a replica, None where tracing is off. Raises as `router_tracing`."""
    if config.otlp_traces_endpoint is None:
        return None
    with _explained(config.otlp_traces_endpoint):
        from cluster.telemetry.tracing.engine_spans import EngineSpans
        from cluster.telemetry.tracing.provider import exporter_to, tracing_to

        tracing = tracing_to(exporter_to(config.otlp_traces_endpoint), "replica", replica_id)
        return EngineSpans(tracing, replica_id, config.model_id)


@contextmanager
def _explained(endpoint: str) -> Iterator[None]:
    flag = "otlp_traces_endpoint"
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{flag}: {error.name} is not installed on this node; {EXTRA} brings it", flag) from error
    except OSError as error:
        why = f"cannot write to {endpoint} ({error}); name a file in a folder that exists"
        raise ConfigError(f"{flag}: {why}", flag) from error
