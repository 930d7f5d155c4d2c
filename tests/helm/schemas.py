"""Kubernetes' own schemas and those of KubeRay's resources, closed, so that a misspelt field is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema import ValidationError as SchemaError
from jsonschema.validators import extend
from kubernetes_validate import ValidationError, validate

from tests.helm.rendered import ROOT, Object

KUBERAY = ROOT.parent / "shared" / "data" / "kuberay"
OPEN = "x-kubernetes-preserve-unknown-fields"
RULES = "x-kubernetes-validations"  # in CEL, which only an API server evaluates
# Kubernetes that the objects must fit: the oldest that the chart allows, and the newest that has schemas here.
VERSIONS = ("1.28", "1.37")
CORE = {
    *("ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "PersistentVolumeClaim", "Ingress", "Pod"),
    *("ServiceAccount", "Role", "RoleBinding", "Job"),
}


def core_trouble(thing: Object, version: str) -> list[str]:
    """Return what is wrong with an object that Kubernetes itself knows."""
    try:
        validate(thing, version, strict=True)
    except ValidationError as error:
        return [f"{thing['kind']}: {'.'.join(map(str, error.absolute_path))}: {error.message}"]
    return []


def pod_of(template: Object) -> Object:
    """Return a pod of a template, which is what Kubernetes' schemas know."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod"} | template["metadata"],
        "spec": template["spec"],
    }


def ray_trouble(thing: Object) -> list[str]:
    """Return what is wrong with an object of KubeRay, or cannot be known here: what its rules are about."""
    errors = _ray_validator(thing["kind"]).iter_errors(thing)
    return [f"{thing['kind']}: {error.json_path}: {error.message}" for error in errors]


def _beyond(_validator: Any, rules: list[Object], _thing: Any, _schema: Any) -> Iterator[SchemaError]:
    for rule in rules:
        yield SchemaError(f"nobody here can say whether it fits the rule {rule['rule']}")


@cache
def _ray_validator(kind: str) -> Draft202012Validator:
    validator = extend(Draft202012Validator, {RULES: _beyond})
    return validator(closed(json.loads((KUBERAY / f"{kind}.v1.json").read_text())["schema"]))


def closed(schema: Any) -> Any:
    """Return a schema in which objects that list their properties have no others."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not schema.get(OPEN):
        inner.setdefault("additionalProperties", False)
    return inner
