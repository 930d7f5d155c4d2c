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
    return {"$schema": DIALECT, "title": "Values of the chart squadron", **_object(properties(), ["models"])}


def properties() -> dict[str, dict[str, Any]]:
    """Return the schema of each top-level value, in the order of values.yaml."""
    model = _object({**model_settings(), "workerGroup": WORKER_GROUP}, ["model"])
    models = {"description": MODELS, "type": "array", "minItems": 1, "items": model}
    app = {"description": APP, **_object(app_settings(), [])}
    return {"models": models, "app": app, **_parts(), "global": GLOBAL}


def _parts() -> dict[str, dict[str, Any]]:
    described = Values.model_json_schema()
    return {name: _inlined(schema, described["$defs"]) for name, schema in described["properties"].items()}


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
