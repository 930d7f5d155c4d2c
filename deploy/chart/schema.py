"""values.schema.json: what Helm checks values against, before any template is rendered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.chart.settings import app_settings, model_settings, plain
from deploy.chart.values import Values

DIALECT = "http://json-schema.org/draft-07/schema#"  # the one that both Helm 3 and Helm 4 know
MODELS = "Models that are served: the engine's settings of each, named as the flags of `squadron serve`."
APP = "Settings of the whole app, named as the flags of `squadron serve`; a setting of models here is refused."
WORKER_GROUP = {
    "description": "Pods that it runs on, by the name of their group; empty = the first.",
    "type": ["string", "null"],
}
GLOBAL = {"description": "What a parent chart hands to all its parts; not used here.", "type": "object"}


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
