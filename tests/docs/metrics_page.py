"""docs/reference/metrics.md: tables of all metrics, from the table of families, between two marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from cluster.telemetry.families import TABLE, Family, Kind, Source
from engine.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
BEGIN = "<!-- families: written by `make docs` -->"
END = "<!-- end of families -->"
TITLES = {
    Source.ROUTER: "Of each router, at its `/metrics` and through Ray",
    Source.TOLD: "Of each replica, at the routers' `/metrics` and through Ray",
    Source.REPLICA: "Of each replica, through Ray",
    Source.RANK: "Of each rank, through Ray",
}
COLUMNS = "| Family | Type | Labels | vLLM's | |\n| --- | --- | --- | --- | --- |"


def page(text: str) -> str:
    """Return the page with current tables between its marks. Raises `ConfigError` if it has no marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"docs/reference/metrics.md must hold the lines {BEGIN} and {END}", "metrics.md")
    return f"{before}{BEGIN}\n{_tables()}\n{END}{after}"


def _tables() -> str:
    parts = [_section(source, [one for one in TABLE if one.source is source]) for source in Source]
    return "\n".join([*parts, _buckets()])


def _section(source: Source, families: Iterable[Family]) -> str:
    return "\n".join([f"\n### {TITLES[source]}\n", COLUMNS, *map(_row, families)])


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    added = ", ".join(f"`{label}`" for label in family.own_labels)
    through_ray = f"; through Ray also {added}" if added else ""
    same = "" if not family.vllm else "yes" if family.vllm == family.name else f"in `{family.vllm}`"
    return f"| `{family.shown_name}` | {family.kind.value} | {labels}{through_ray} | {same} | {family.text} |"


def _buckets() -> str:
    lines = ["\n### Buckets\n", "| Histograms | Upper bounds; those in brackets are not vLLM's |", "| --- | --- |"]
    return "\n".join([*lines, *_bucket_rows(), ""])


def _bucket_rows() -> Iterator[str]:
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in TABLE:
        if family.kind is Kind.HISTOGRAM:
            finer = len(family.buckets) if not family.vllm else family.finer
            bounds = tuple(f"({bound:g})" if i < finer else f"{bound:g}" for i, bound in enumerate(family.buckets))
            alike.setdefault(bounds, []).append(f"`{family.full_name}`")
    return (f"| {', '.join(names)} | {' '.join(bounds)} |" for bounds, names in alike.items())
