"""The README's tables of values, written between two marks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.chart.schema import properties
from deploy.chart.settings import shown_defaults
from deploy.chart.values import Values
from engine.errors import ConfigError

BEGIN = "<!-- values: written by `python -m deploy.chart` -->"
END = "<!-- end of values -->"
COLUMNS = ("| Value | Type | Default | |", "| --- | --- | --- | --- |")
SETTINGS = ("models", "app")
Schema = Mapping[str, Any]


def with_table(readme: str) -> str:
    """Return a README with the table of now between its marks. Raises `ConfigError` where it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the chart's README.md must hold the lines {BEGIN} and {END}", "README.md")
    return f"{before}{BEGIN}\n{_tables()}\n{END}{after}"


def _tables() -> str:
    known = properties()
    defaults = Values().model_dump()
    lines = ["", *COLUMNS]
    for name in (name for name in defaults if name not in SETTINGS):
        lines += _rows(name, known[name], defaults[name])
    model, app = known["models"]["items"]["properties"], known["app"]["properties"]
    lines += ["", "Of each of `models`:", "", *COLUMNS, *_settings(model)]
    lines += ["", "Of `app`:", "", *COLUMNS, *_settings(app)]
    return "\n".join(lines)


def _rows(path: str, schema: Schema, default: Any) -> Iterator[str]:
    items = schema.get("items", {})
    if "properties" in schema:
        for name, inner in schema["properties"].items():
            yield from _rows(f"{path}.{name}", inner, default[name])
    elif "properties" in items and default:
        for name, inner in items["properties"].items():
            yield from _rows(f"{path}[].{name}", inner, default[0][name])
    else:
        yield _row(path, schema, f"`{json.dumps(default)}`")


def _settings(schemas: Mapping[str, Schema]) -> Iterator[str]:
    shown = shown_defaults()
    for name, schema in schemas.items():
        yield _row(name, schema, "needed" if name == "model" else shown.get(name, "the first"))


def _row(path: str, schema: Schema, default: str) -> str:
    text = schema.get("description", "")
    if "enum" in schema:
        kind = " / ".join(f"`{choice}`" for choice in schema["enum"] if choice is not None)
    else:
        types = schema.get("type", "any")
        kind = " / ".join(one for one in ([types] if isinstance(types, str) else types) if one != "null")
    return f"| `{path}` | {kind} | {_cell(default)} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
