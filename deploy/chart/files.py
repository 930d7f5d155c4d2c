"""The texts of files that the chart ships: values.yaml, the tables in its README, dashboards and alerts."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig
from cluster.config_values import DEFAULT_TTFT, ScalingSettings
from cluster.lifecycle.serve_autoscaling import POLICY, autoscaling_fields
from cluster.resources import BATCHES_CPUS, ROUTER_CPUS
from deploy.chart.pods import Part, WorkerGroup
from deploy.chart.schema import APP, MODELS, properties, shown_defaults
from deploy.chart.values import Values
from deploy.observability.alerts import Scope, rules_text
from deploy.observability.engine import ENGINE
from deploy.observability.grafana import dashboard_text
from deploy.observability.service import SERVICE
from engine.errors import ConfigError

WIDTH = 110
HEAD = "Written by `python -m deploy.chart` from deploy/chart: change it there."
DEFAULT_MODELS = [{"model": "demo"}]
OF_A_MODEL = ("min_replicas", "initial_replicas", "max_replicas")


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


def app_text() -> str:
    """Return the text of defaults/app.yaml: what of the app's code templates need to know.

    What Serve's config file says of a deployment replaces what the code says, all of it.
    """
    plain = ClusterConfig("demo")
    times = ScalingSettings(
        0, 1, DEFAULT_TTFT, plain.upscale_delay_s, plain.downscale_delay_s, plain.downscale_delay_s
    )
    scaling = {name: value for name, value in autoscaling_fields(times, 1).items() if name not in OF_A_MODEL}
    known = {
        "autoscaling": scaling | {"policy": {"policy_function": POLICY, **scaling["policy"]}},
        "drain_timeout": plain.drain_timeout,
        "router_cpus": ROUTER_CPUS,
        "batches_cpus": BATCHES_CPUS,
    }
    return f"# {HEAD}\n" + yaml.safe_dump(known, sort_keys=False)


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


WRITTEN_HEAD = "Written by `python -m deploy.chart` from deploy/observability/alerts.py: change it there."
DASHBOARDS = {"service": SERVICE, "engine": ENGINE}


def dashboard_files(folder: Path) -> dict[Path, str]:
    """Return what `folder` should hold in dashboards/. Helm reads files of its chart alone."""
    return {folder / "dashboards" / f"{name}.json": dashboard_text(one) for name, one in DASHBOARDS.items()}


def rules_file(folder: Path, ttft: str, scope: Scope) -> dict[Path, str]:
    """Return what the file of alerts in `folder` should hold. ttft and scope: as of `alerts`."""
    return {folder / "squadron.rules.yaml": rules_text(WRITTEN_HEAD, ttft, scope)}
