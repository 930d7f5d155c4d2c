"""What `squadron batch` was told beside the settings of model and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cluster.batch.output.spec import Style
from cluster.batch.plain_rows import ColumnOptions
from cluster.batch.run import RunLimits
from cluster.batch.tasks import RowKind
from engine.errors import ConfigError

Kind = TypeVar("Kind", bound=StrEnum)
NO_OBJECT = "params must be a JSON object such as '{\"top_p\": 0.9}'"


@dataclass(frozen=True, slots=True)
class ServedApp:
    """A Serve app whose replicas run the rows. model: which of its models; None = its only one."""

    name: str
    model: str | None = None


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What to run, and how.

    inputs, output: paths, patterns or URLs; "-" = standard input. kind, style: of rows and of the output; None = as
    the first row looks. ledger: folder of what is done so far; None = beside the output. share: of `Work`.
    ray_address: cluster to join; None = start one. log_interval: seconds between two lines of progress where there is
    no terminal. created: seconds since 1970 that answers carry; None = when the batch began.
    """

    inputs: tuple[str, ...]
    output: str
    kind: RowKind | None = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    answer_column: str = "answer"
    style: Style | None = None
    stdin_suffix: str = ".jsonl"
    ledger: Path | None = None
    limits: RunLimits = field(default_factory=RunLimits)
    share: float | None = None
    resume: bool = False
    dry_run: bool = False
    ray_address: str | None = None
    log_interval: float = 10.0
    created: int | None = None
    verbose: bool = False


def body_fields(text: str | None) -> Mapping[str, Any]:
    """Return fields of every request: those of `text`, a JSON object. Raises `ConfigError` where it is none."""
    if text is None:
        return {}
    try:
        fields = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{NO_OBJECT}: {error}", "params") from None
    if not isinstance(fields, dict):
        raise ConfigError(NO_OBJECT, "params")
    return fields


def named(kind: type[Kind], name: str | None, option: str) -> Kind | None:
    """Return the kind of that name, None without one. Raises `ConfigError` naming the flag."""
    if name is None:
        return None
    if name not in [*kind]:
        raise ConfigError(f"{option} must be {' or '.join(kind)}, not {name!r}", option)
    return kind(name)
