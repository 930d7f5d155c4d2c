"""How the commands that ask a server show what it says: `status`, `top` and `why`.

On a terminal a head line, tables without lines, and notices; for other programs lines of `name=value`, or JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

GOOD, BAD = "bold green", "bold red"  # styles of a head's first word
BAR = 6  # columns of a bar


def console_for_reports() -> Console:
    """Return where reports are printed."""
    return Console(highlight=False, soft_wrap=False)


def head(word: str, style: str, *facts: str, title: str = "") -> Text:
    """Return the first line of a report: how it is, of what, and facts beside it."""
    said = " · ".join(fact for fact in facts if fact)
    return Text.assemble((word, style), f"  {title}  " if title else "  ", (said, "dim"))


def notice(text: str) -> Text:
    """Return a sentence about what is wrong, or missing."""
    return Text(text, style="yellow")


def table_of(texts: Iterable[str], numbers: Iterable[str] = (), *, fold: bool = False) -> Table:
    """Return a table with columns of texts, then of numbers. fold: whether the last column of texts may be long."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in texts:
        shown.add_column(name, no_wrap=True)
    for name in numbers:
        shown.add_column(name, justify="right", no_wrap=True)
    if fold:
        shown.add_column("", overflow="fold")
    return shown


def share_bar(share: float) -> Text:
    """Return a bar of `BAR` columns with a share (0 to 1), and the share beside it."""
    full = round(share * BAR)
    return Text.assemble(("━" * full, "magenta"), ("─" * (BAR - full), "bright_black"), f" {share:4.0%}")


def plain_word(word: str) -> str:
    """Return the word of a head as lines for programs begin."""
    return word.lower().replace(" ", "-")


def pairs(values: Mapping[str, object]) -> list[str]:
    """Return `name=value` of those that say something, in quotes where there is a space."""
    return [f"{name}={_quoted(str(value))}" for name, value in values.items() if value not in (None, "")]


def show(
    console: Console, as_json: bool, public: Mapping[str, Any], picture: RenderableType, lines: list[str]
) -> None:
    """Print one report: as JSON if asked for, as a picture on a terminal, else as lines."""
    if as_json:
        print(json.dumps(public), flush=True)
    elif console.is_terminal:
        console.print(picture)
    else:
        print("\n".join(lines), flush=True)


def _quoted(value: str) -> str:
    return f'"{value}"' if " " in value else value
