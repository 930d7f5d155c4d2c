"""docs/reference/flags.md and configuration.md: from the parser of the command line and from the config models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer
from pydantic import TypeAdapter

from cluster.app_config import PER_MODEL
from cluster.config import ClusterConfig
from deploy.chart.schema import BOUNDS, plain
from deploy.cli.flags import CHOICES, POSITIONAL, settings
from deploy.main import app

FLAGS = """\
# Flags

`make docs` writes this page from the parser of the command line; a test checks that it is up to date.

Flags have vLLM's names where vLLM has them; [from-vllm.md](../guides/from-vllm.md) says what else is taken. A flag of
`squadron serve` is also a [setting](configuration.md), spelt with underscores.
"""
CONFIGURATION = """\
# Configuration

`make docs` writes this page from the config models; a test checks that it is up to date.

`squadron serve --config FILE` reads settings from a YAML file; the command line overrides the file. The same settings
are `args` of `serve deploy`, arguments of `serve run cluster.app:build`, and `models` and `app` of
[the chart](../../helm/squadron/README.md). An unknown setting is an error that names the nearest known one.

```yaml
model: demo
tensor_parallel_size: 2
replicas: 2
port: 8000
```

With [several models](../guides/several-models.md), each entry of `models` has settings of a model; settings of the
app stand beside `models`. [tenants.md](../guides/tenants.md) describes the file of keys.

Environment variables: `SQUADRON_API_KEY` (as `--api-key`), `SQUADRON_METRICS_KEY` (as `--metrics-key`), `RAY_ADDRESS`
(the Ray cluster to join).
"""
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}


def flags_page() -> str:
    """Return the text of flags.md."""
    commands = _commands(typer.main.get_command(app))
    served = {flag.names: flag for flag in _flags(commands["squadron serve"])}
    return FLAGS + "".join(_command(name, command, served) for name, command in commands.items())


@dataclass(frozen=True, slots=True)
class Flag:
    """A row of a table: what follows the flag, its help text, and the help page's panel that it is in."""

    names: str
    values: str
    text: str
    panel: str


NONE = Flag("", "", "", "")


def _commands(group: Any, prefix: str = "squadron") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= _commands(command, f"{prefix} {name}") if inner else {f"{prefix} {name}": command}
    return found


def _command(name: str, command: Any, served: Mapping[str, Flag]) -> str:
    """Return a command's section. What it shares with `squadron serve` is only named."""
    usage = command.get_usage(typer.Context(command, info_name=name)).partition(": ")[2]
    lines = [f"\n## `{name}`", "", " ".join((command.help or "").split()), "", f"`{' '.join(usage.split())}`", ""]
    flags = _flags(command)
    own = [flag for flag in flags if name == "squadron serve" or flag.text != served.get(flag.names, NONE).text]
    panels = dict.fromkeys(flag.panel for flag in own) if name == "squadron serve" else {None: None} if own else {}
    for panel in panels:
        lines += [f"### {panel}", ""] if panel else []
        lines += ["| Flag | Values | |", "| --- | --- | --- |"]
        lines += [f"| {one.names} | {one.values} | {one.text} |" for one in own if panel in (None, one.panel)]
        lines.append("")
    if shared := [flag.names for flag in flags if flag not in own]:
        lines += [f"As for `squadron serve`: {', '.join(shared)}.", ""]
    return "\n".join(lines)


def _flags(command: Any) -> list[Flag]:
    options = [param for param in command.params if param.param_type_name == "option" and param.name != "help"]
    return [_flag(param, typer.Context(command)) for param in options]


def _flag(param: Any, context: typer.Context) -> Flag:
    names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
    kind = str(param.metavar or param.display_type(context)).strip("<>")
    values = "" if param.is_flag else " ".join(f"`{one}`" for one in kind.split("|"))
    return Flag(names, values, _cell(f"{param.help or ''}{_default(param)}"), param.rich_help_panel or "Command")


def _default(param: Any) -> str:
    if isinstance(param.show_default, str):
        return f" (default: {param.show_default})"
    return f" (default: {param.default})" if param.show_default and param.default not in (None, False) else ""


def configuration_page() -> str:
    """Return the text of configuration.md."""
    schemas = TypeAdapter(ClusterConfig).json_schema()["properties"]
    model = [name for name in schemas if name in PER_MODEL]
    wide = [name for name in schemas if name not in PER_MODEL]
    rows = _rows(schemas)
    return CONFIGURATION + "".join(
        "\n".join(["", f"## {title}", "", "| Setting | Type | Default | |", "| --- | --- | --- | --- |", *lines, ""])
        for title, lines in (
            ("Settings of a model", [rows[name] for name in model]),
            ("Settings of the app", [rows[name] for name in wide]),
        )
    )


def _rows(schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    known = {setting.name: (setting.shown, setting.help) for setting in settings()}
    known[POSITIONAL] = ("required", "A folder, a hub id, or `demo`.")
    return {
        name: f"| `{name}` | {'; '.join(_type(name, schema))} | {_cell(known[name][0])} | {_cell(known[name][1])} |"
        for name, schema in schemas.items()
    }


def _type(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    described = {**plain(schema), **BOUNDS.get(name, {})}
    if name in CHOICES:
        yield " ".join(f"`{choice}`" for choice in CHOICES[name])
        return
    types = described.get("type", "any")
    yield " or ".join(one for one in ([types] if isinstance(types, str) else types) if one != "null")
    yield from (text.format(described[key]) for key, text in LIMITS.items() if key in described)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
