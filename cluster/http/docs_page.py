"""`/docs`: the API document as a page for people. It has no scripts and loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .3rem 0; }
code, .verb { font-family: ui-monospace, monospace; }
.verb { display: inline-block; min-width: 4rem; font-weight: 600; }
table { border-collapse: collapse; margin: .5rem 0 1rem; width: 100%; }
td, th { border: 1px solid #8886; padding: .2rem .5rem; text-align: left; vertical-align: top; }
:root { color-scheme: light dark; }
"""
Node = Mapping[str, Any]


def openapi_page(document: Node) -> str:
    """Return the page of an OpenAPI document: its operations, each with its fields."""
    info = document["info"]
    schemas = document["components"]["schemas"]
    operations = [
        _operation(path, verb, operation, schemas)
        for path, verbs in document["paths"].items()
        for verb, operation in verbs.items()
    ]
    title = escape(f"{info['title']} {info['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{escape(info['description'])}</p>"
        f'<p><a href="openapi.json">openapi.json</a></p>{"".join(operations)}</body></html>'
    )


def _operation(path: str, verb: str, operation: Node, schemas: Node) -> str:
    head = f'<span class="verb">{verb.upper()}</span> <code>{escape(path)}</code> {escape(operation["summary"])}'
    parameters = {one["name"]: one["schema"] for one in operation.get("parameters", ())}
    body = operation.get("requestBody", {}).get("content", {})
    fields, required = dict(parameters), set[str]()
    for content in body.values():
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        fields |= schema["properties"]
        required |= set(schema.get("required", ()))
    rows = "".join(_row(name, field, name in required) for name, field in fields.items())
    table = f"<table><tr><th>Field<th>Type<th></tr>{rows}</table>" if rows else "<p>No fields.</p>"
    return f"<details><summary>{head}</summary>{table}</details>"


def _row(name: str, field: Node, required: bool) -> str:
    note = escape(str(field.get("description", ""))) + (" <b>required</b>" if required else "")
    return f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(field))}<td>{note}</tr>"


def _kind(field: Node) -> str:
    """The type of a field in a word or two; null stands for what may be left out."""
    either = [one for one in field.get("anyOf", ()) if one.get("type") != "null"]
    if either:
        return " or ".join(dict.fromkeys(_kind(one) for one in either))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field or "const" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))
