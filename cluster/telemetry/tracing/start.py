"""Switches tracing on where the configuration asks for it; else nothing of it is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import ClusterConfig
from engine.errors import ConfigError

if TYPE_CHECKING:
    from cluster.telemetry.tracing.engine_spans import EngineSpans
    from cluster.telemetry.tracing.provider import Tracing

FLAG = "otlp_traces_endpoint"
EXTRA = "pip install -e '.[otel]' in Squadron's folder"


def process_tracing(config: ClusterConfig, role: str, instance: str) -> Tracing | None:
    """Return the tracing of this process, None where it is off. role: `router` or `replica`.

    Raises `ConfigError` where a package or the file's folder is missing.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    try:
        from cluster.telemetry.tracing.provider import exporter_to, tracing_to

        return tracing_to(exporter_to(endpoint), role, instance)
    except ImportError as error:
        raise ConfigError(f"{FLAG}: {error.name} is not installed on this node; {EXTRA} brings it", FLAG) from error
    except OSError as error:
        why = f"cannot write to {endpoint} ({error}); name a file in a folder that exists"
        raise ConfigError(f"{FLAG}: {why}", FLAG) from error


def replica_spans(config: ClusterConfig, replica_id: str) -> EngineSpans | None:
    """Return what makes the spans of a replica, None where tracing is off. Raises as `process_tracing`."""
    tracing = process_tracing(config, "replica", replica_id)
    if tracing is None:
        return None
    from cluster.telemetry.tracing.engine_spans import EngineSpans

    return EngineSpans(tracing, replica_id, config.model_id)
