"""`squadron quantize`: writes a checkpoint again with smaller weights, and says what became of it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from cluster.model_names import resolve_model
from engine.config import EngineConfig
from engine.loader.checkpoint import HUB_FILES, open_model
from engine.loader.quantised_copy import COPIED, QuantisedCopy, write_quantised

SHOWN = 6  # plain modules that are named


def quantize_model(model: str, folder: Path, quantization: str, group_size: int | None) -> None:
    """Write the copy, with a bar on a terminal. Raises `ConfigError` and `CheckpointError`."""
    asked = EngineConfig(resolve_model(model), quantization=quantization, quantization_group_size=group_size)
    found = open_model(asked.model, (*HUB_FILES, *COPIED), impl="native")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was begun is removed on the way
    console = Console(highlight=False, soft_wrap=True)
    columns = (*Progress.get_default_columns()[:3], TextColumn("{task.fields[read]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{quantization} of {escape(model)}", read="", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, read=f"{_gb(done)} of {_gb(total)}")

        copy = write_quantised(found, folder, quantization, group_size, show)
    for line in _told(copy, folder, asked.weight_form or ""):
        console.print(escape(line))


def _told(copy: QuantisedCopy, folder: Path, form: str) -> list[str]:
    more = f" and {len(copy.plain) - SHOWN} more" if len(copy.plain) > SHOWN else ""
    plain = ", ".join(copy.plain[:SHOWN]) + more
    return [
        f"{folder}: {_gb(copy.after)} of weights, {_gb(copy.before)} before: {copy.layers} linear layers in {form}",
        *([f"left as they were: {plain}"] if plain else []),
        f"serve it: squadron serve {folder}",
    ]


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
