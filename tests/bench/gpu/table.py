"""Results as Markdown: one table per part; what nobody measured is an empty cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import GIVEN
from tests.bench.gpu.results import Results, Row

HEAD = "| | value | unit | limit | of it | of the measured limit | aim | spread |"
RULE = "| --- | ---: | --- | ---: | ---: | ---: | --- | ---: |"


def tables(parts: Sequence[Part], results: Results) -> str:
    """Return the tables of all parts, and what they were measured on."""
    lines = [line for part in parts for line in _table(part, results)]
    return "\n".join([*lines, *_machines(results)]).rstrip() + "\n"


def _table(part: Part, results: Results) -> Iterator[str]:
    rows = {figure.name: results.rows.get(figure.name) for figure in part.figures}
    runs = sorted({row.run for row in rows.values() if row is not None and row.value is not None})
    where = f"; run {', '.join(map(str, runs))}" if runs else ""
    yield from (f"### {part.title}", "", f"`--only {part.name}`{where}", "", HEAD, RULE)
    yield from (_line(figure, rows[figure.name], results) for figure in part.figures)
    yield ""
    told = [(figure, rows[figure.name]) for figure in part.figures]
    reasons = [f"- {figure.what}: {_reason(row)}" for figure, row in told if row is not None and _reason(row)]
    yield from [*reasons, ""] if reasons else []


def _line(figure: Figure, row: Row | None, results: Results) -> str:
    limit = figure.limit(GIVEN) if figure.limit else None
    measured = row is not None and row.value is not None
    cells = [
        figure.what,
        number(row.value) if measured else "",
        figure.unit,
        number(limit),
        percent(row.share) if measured else "",
        percent(results.share_here(figure)) if measured else "",
        figure.aim,
        percent(row.spread) if measured else "",
    ]
    return "| " + " | ".join(cells) + " |"


def _reason(row: Row) -> str:
    if row.value is not None:
        return row.note
    return f"failed: {row.error}" if row.error else row.skipped


def _machines(results: Results) -> Iterator[str]:
    used = sorted({row.run for row in results.rows.values() if row.value is not None})
    if not used:
        return
    yield from ("### Measured on", "")
    runs = {index: results.runs[index] for index in used if index < len(results.runs)}
    yield from dict.fromkeys(f"- {_device(run)}" for run in runs.values())
    for index, run in runs.items():
        commit = f", commit {run['commit']}" if run.get("commit") else ""
        yield f"- run {index}, {run.get('date', '')}{commit}{_clocks(run)}"


def _device(run: Mapping[str, Any]) -> str:
    return "; ".join(
        fact for fact in (run.get("gpu", run.get("device", "")), _pairs(run.get("versions", {}))) if fact
    )


def _clocks(run: Mapping[str, Any]) -> str:
    keys = (("before", "clocks"), ("while it worked", "clocks_during"), ("after", "clocks_after"))
    told = [(when, _pairs(run.get(key, {}))) for when, key in keys]
    return "".join(f"; {when}: {pairs}" for when, pairs in told if pairs)


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value)


def number(value: float | None) -> str:
    """Return a number in four digits, or as many as stand before the point; "" for none."""
    if value is None:
        return ""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 0.001 or not size else f"{value:.2e}"


def percent(value: float | None) -> str:
    """Return a share in percent; "" for none."""
    return "" if value is None else f"{100 * value:.1f} %"
