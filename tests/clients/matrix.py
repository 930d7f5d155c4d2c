"""The table of docs/guides/clients.md: for each client what was run of it, what passed, and on which day."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tests.clients.catalogue import CLIENTS, Client
from tests.clients.running import Outcome, Result

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"
ALL = "all"
_ROWS = re.compile(r"(?:\|.*\n)*")
_HEAD = "| Client | Packages | Checks | Passed | Day | Script |\n| --- | --- | --- | --- | --- | --- |\n"


@dataclass(frozen=True, slots=True)
class Row:
    """The cells behind the client's name. passed: `ALL`, or which did, and why others not."""

    packages: str
    checks: str
    passed: str
    day: str
    script: str


def row_of(client: Client, passed: str, day: str) -> Row:
    """Return the row of a client."""
    packages = " ".join(f"`{package}`" for package in client.packages)
    return Row(packages, ", ".join(client.checks), passed, day, f"`{client.script}`")


def row_of_result(result: Result, day: date) -> Row:
    """Return what a run is to the page."""
    if result.outcome is Outcome.PASSED:
        passed = ALL
    else:
        reason = " ".join(result.reason.replace("|", r"\|").split())
        passed = f"{result.outcome}: {reason}"
        if result.checks:
            passed = f"{', '.join(result.checks)}; {passed}"
    return row_of(result.client, passed, day.isoformat())


def rows_of(page: str) -> dict[str, Row]:
    """Return the rows of a page by the client's name."""
    found = {}
    for line in _lines(page.partition(_HEAD)[2]).splitlines():
        name, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        found[name.strip("`")] = Row(*cells)
    return found


def page_with(page: str, results: Sequence[Result], day: date) -> str:
    """Return a page with the rows of these runs in the place of older ones, in the order of the catalogue.

    Raises:
        ValueError: the page has no such table.
    """
    before, head, behind = page.partition(_HEAD)
    if not head:
        raise ValueError(f"the page has no table that begins with {_HEAD.splitlines()[0]}")
    rows: Mapping[str, Row] = rows_of(page) | {one.client.name: row_of_result(one, day) for one in results}
    lines = [
        f"| `{client.name}` | {row.packages} | {row.checks} | {row.passed} | {row.day} | {row.script} |\n"
        for client in CLIENTS
        if (row := rows.get(client.name))
    ]
    return f"{before}{head}{''.join(lines)}{behind.removeprefix(_lines(behind))}"


def _lines(behind: str) -> str:
    found = _ROWS.match(behind)
    return found[0] if found else ""
