"""values.yaml: every value with its default and what it is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from deploy.chart.part import Part
from deploy.chart.pods import WorkerGroup
from deploy.chart.schema import APP, MODELS
from deploy.chart.values import Values

WIDTH = 110
HEAD = "Written by `python -m deploy.chart` from deploy/chart: change it there."
DEFAULT_MODELS = [{"model": "demo"}]


def values_text() -> str:
    """Return the text of values.yaml."""
    lines = [
        *_comment(HEAD, ""),
        "",
        *_comment(MODELS, ""),
        *_dumped("models", DEFAULT_MODELS, ""),
        "",
        *_comment(APP, ""),
        *_dumped("app", {}, ""),
        *_fields(Values(), "", apart=True),
    ]
    return "\n".join(lines) + "\n"


def group_text() -> str:
    """Return the text of defaults/worker-group.yaml: what a worker group is where its user says nothing.

    Helm merges no defaults into the items of a list.
    """
    group = WorkerGroup(name="workers").model_dump(exclude={"name"})
    return f"# {HEAD}\n" + yaml.safe_dump(group, sort_keys=False)


def _fields(part: Part, indent: str, apart: bool = False) -> Iterator[str]:
    for name, field in type(part).model_fields.items():
        if apart:
            yield ""
        yield from _comment(field.description or "", indent)
        yield from _field(name, getattr(part, name), indent)


def _field(name: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Part):
        yield f"{indent}{name}:"
        yield from _fields(value, indent + "  ")
    elif isinstance(value, list) and value and isinstance(value[0], Part):
        yield f"{indent}{name}:"
        for item in value:
            yield from _item(item, indent + "  ")
    else:
        yield from _dumped(name, value, indent)


def _item(part: Part, indent: str) -> Iterator[str]:
    """An item of a list: its dash stands before the first field, whose comment goes above."""
    dashed = False
    for line in _fields(part, indent + "  "):
        if dashed or line.lstrip().startswith("#"):
            yield line
        else:
            dashed = True
            yield f"{indent}- {line.lstrip()}"


def _dumped(name: str, value: Any, indent: str) -> Iterator[str]:
    text = yaml.safe_dump({name: value}, sort_keys=False, width=WIDTH)
    yield from (indent + line for line in text.splitlines())


def _comment(text: str, indent: str) -> Iterator[str]:
    yield from (f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH - len(indent) - 2))
