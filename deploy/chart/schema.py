"""values.schema.json: what Helm checks values against, before any template is rendered.

The settings of models and app are those of `ClusterConfig`, as JSON schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from cluster.app_config import APP_WIDE, PER_MODEL
from cluster.config import ClusterConfig
from cluster.config_values import SHORT_NUMBERS
from deploy.chart.values import Values
from deploy.cli.flags import CHOICES, POSITIONAL, settings
from engine.config import LEAST_GROUP

# What the chart says itself: where to listen, where keys are, and what it has no Service or NetworkPolicy for.
OWNED_BY_CHART = ("host", "port", "ingress", "grpc_port", "api_key", "api_key_file", "metrics_key", "link_host")
APP_SETTINGS = tuple(name for name in APP_WIDE if name not in OWNED_BY_CHART)
MODEL_HELP = "A folder in the pods, a hub id, or 'demo'."
# Lists that one string may hold, too.
LISTS = ("served_model_name", "cudagraph_capture_sizes", "allowed_hosts", "allowed_origins")
# Texts of JSON that a map may say, too.
OBJECTS = ("hf_overrides", "override_generation_config")
# Numbers as people write them: `engine.short_numbers.short_number`.
SHORT = r"[0-9]+(\.[0-9]+)?[kmgt]|[0-9]+[KMGT]"
# What configs refuse when they are made, which their annotations do not say.
BOUNDS: Mapping[str, Mapping[str, Any]] = {
    "tensor_parallel_size": {"minimum": 1},
    "quantization_group_size": {"minimum": LEAST_GROUP},
    "max_num_seqs": {"minimum": 1},
    "max_num_batched_tokens": {"minimum": 1},
    "max_model_len": {"minimum": 2},
    "num_kv_blocks": {"minimum": 2},
    "kv_cache_memory_bytes": {"minimum": 1},
    "long_prefill_token_threshold": {"minimum": 0},
    "max_logprobs": {"minimum": -1},
    "block_size": {"minimum": 1},
    "state_snapshot_blocks": {"minimum": 1},
    "num_state_snapshots": {"minimum": 0},
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
    if "string" in described["type"] and not {"enum", "pattern", "items"} & set(described):
        described["pattern"] = r"\S"  # the app refuses blank texts
    if name in OBJECTS:
        described["type"] = ["object", *described["type"]]
        described["pattern"] = r"^\s*\{[\s\S]*\}\s*$"
    if name in LISTS:
        described["type"] = ["string", *described["type"]]
    if name in SHORT_NUMBERS:
        types = described["type"]
        described["type"] = [*([types] if isinstance(types, str) else types), "string"]
        described["pattern"] = f"^({'auto|' if name == 'max_model_len' else ''}{SHORT})$"
    return described


def plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without title and default, and "this or null" as a list of types.

    Validators report such a list by the field's name, of `anyOf` only that nothing matched.
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


DIALECT = "http://json-schema.org/draft-07/schema#"  # the one that both Helm 3 and Helm 4 know
MODELS = "Models to serve, with settings named as the flags of `squadron serve`."
APP = "Settings of the whole app, named as the flags of `squadron serve`; settings of a model are refused here."
WORKER_GROUP = {
    "description": "Name of its worker group; empty = the first.",
    "type": ["string", "null"],
}
GLOBAL = {"description": "Values of a parent chart; not used here.", "type": "object"}


def values_schema() -> dict[str, Any]:
    """Return the JSON schema of all values."""
    known = properties()
    return {
        "$schema": DIALECT,
        "title": "Values of the chart squadron",
        **_object(known, _needed(known, _defaults())),
    }


def properties() -> dict[str, dict[str, Any]]:
    """Return the schema of each top-level value, in the order of values.yaml."""
    model = _object({**model_settings(), "workerGroup": WORKER_GROUP}, ["model"])
    models = {"description": MODELS, "type": "array", "minItems": 1, "items": model}
    app = {"description": APP, **_object(app_settings(), [])}
    return {"models": models, "app": app, **_parts(), "global": GLOBAL}


def _parts() -> dict[str, dict[str, Any]]:
    described, defaults = Values.model_json_schema(), _defaults()
    return {
        name: _whole(_inlined(schema, described["$defs"]), defaults[name])
        for name, schema in described["properties"].items()
    }


def _defaults() -> dict[str, Any]:
    return {"models": [], "app": {}, **Values().model_dump()}


def _whole(schema: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """Return a schema whose objects must have what templates need: null takes a value's default away from it."""
    if "properties" not in schema:
        return dict(schema)
    inner = {name: _whole(one, defaults[name]) for name, one in schema["properties"].items()}
    return {**schema, "properties": inner, "required": _needed(inner, defaults)}


def _needed(schemas: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]) -> list[str]:
    return [name for name, schema in schemas.items() if name in defaults and _must_be_there(schema, defaults[name])]


def _must_be_there(schema: Mapping[str, Any], default: Any) -> bool:
    """Whether nothing is no value here: of texts without a default, lists and maps it means an empty one."""
    if schema["type"] == "object":
        return "properties" in schema
    if schema["type"] == "array":
        return bool(schema.get("minItems"))
    return "null" not in schema["type"] and default != ""


def _inlined(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without references: messages of validators then name the value and nothing else."""
    own = plain({key: value for key, value in schema.items() if key != "$ref"})
    if "$ref" in schema:
        definition = definitions[schema["$ref"].rpartition("/")[2]]
        own = {**_inlined(definition, definitions), **own}
    if "items" in own:
        own["items"] = _inlined(own["items"], definitions)
    if "properties" in own:
        own["properties"] = {name: _inlined(one, definitions) for name, one in own["properties"].items()}
    return own


def _object(schemas: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": dict(schemas)}
    return {**found, "required": required} if required else found
