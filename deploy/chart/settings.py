"""The settings of models and app as the chart takes them: those of `ClusterConfig`, as JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from cluster.app_config import APP_WIDE, PER_MODEL
from cluster.config import ClusterConfig
from deploy.cli.flags import CHOICES, POSITIONAL, settings

# What the chart says itself: where to listen, where keys are, and what it has no Service or NetworkPolicy for.
OWNED_BY_CHART = ("host", "port", "ingress", "grpc_port", "api_key", "api_key_file", "metrics_key", "link_host")
APP_SETTINGS = tuple(name for name in APP_WIDE if name not in OWNED_BY_CHART)
MODEL_HELP = "A folder in the pods, a hub id, or 'demo'."
# Lists that one string may hold, too.
LISTS = ("served_model_name", "cudagraph_capture_sizes", "allowed_hosts", "allowed_origins")
# What configs refuse when they are made, which their annotations do not tell.
BOUNDS: Mapping[str, Mapping[str, Any]] = {
    "tensor_parallel_size": {"minimum": 1},
    "max_num_seqs": {"minimum": 1},
    "max_num_batched_tokens": {"minimum": 1},
    "max_model_len": {"minimum": 2},
    "num_kv_blocks": {"minimum": 2},
    "kv_cache_memory_bytes": {"minimum": 1},
    "long_prefill_token_threshold": {"minimum": 0},
    "block_size": {"minimum": 1},
    "gpu_memory_utilization": {"exclusiveMinimum": 0, "maximum": 1},
    "cudagraph_capture_sizes": {"items": {"type": "integer", "minimum": 1}},
    "step_timeout": {"exclusiveMinimum": 0},
    "otlp_traces_endpoint": {"pattern": r"^(https?://[^/]|file://(localhost)?/.*[^/]$)"},
}


def model_settings() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each setting of a model, by name."""
    return {name: schema for name, schema in _schemas().items() if name in PER_MODEL}


def app_settings() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each setting of the app that the chart leaves to its user, by name."""
    return {name: schema for name, schema in _schemas().items() if name in APP_SETTINGS}


def shown_defaults() -> dict[str, str]:
    """Return what each setting is unless given, in words; the model has no default."""
    return {setting.name: setting.shown for setting in settings()}


def _schemas() -> dict[str, dict[str, Any]]:
    help_of = {POSITIONAL: MODEL_HELP} | {setting.name: setting.help for setting in settings()}
    found = TypeAdapter(ClusterConfig).json_schema()["properties"]
    return {name: _schema(name, schema, help_of[name]) for name, schema in found.items()}


def _schema(name: str, schema: Mapping[str, Any], text: str) -> dict[str, Any]:
    described = {"description": text, **plain(schema), **BOUNDS.get(name, {})}
    if name in CHOICES:
        choices: list[str | None] = list(CHOICES[name])
        described["enum"] = choices + [None] * ("null" in described["type"])
    if name in LISTS:
        described["type"] = ["string", *described["type"]]
    return described


def plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without title and default, and "this or null" as a list of types.

    Validators tell of such a list by the field's name, of `anyOf` only that nothing matched.
    """
    kept = {key: value for key, value in schema.items() if key not in ("title", "default", "anyOf")}
    choices = schema.get("anyOf", ())
    if not choices:
        return kept
    given = [choice for choice in choices if choice.get("type") != "null"]
    if len(given) != 1 or len(choices) != len(given) + 1:
        return {**kept, "anyOf": [plain(choice) for choice in choices]}
    types = given[0]["type"]
    return {**kept, **plain(given[0]), "type": [*([types] if isinstance(types, str) else types), "null"]}
