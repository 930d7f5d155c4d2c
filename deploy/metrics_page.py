"""`python -m deploy.metrics_page` writes the tables of docs/metrics.md from the table of families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from cluster.telemetry.families import TABLE, Family, Kind, Source
from engine.errors import ConfigError

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN = "<!-- families: written by `python -m deploy.metrics_page` -->"
END = "<!-- end of families -->"
TITLES = {
    Source.ROUTER: "Of each router, at its `/metrics` and through Ray",
    Source.TOLD: "Of each replica, at the routers' `/metrics` and through Ray",
    Source.REPLICA: "Of each replica, through Ray",
    Source.RANK: "Of each rank, through Ray",
}
COLUMNS = "| Family | Type | Labels | vLLM's | |\n| --- | --- | --- | --- | --- |"


def page(text: str) -> str:
    """Return the page with the tables of now between its marks. Raises `ConfigError` where it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"docs/metrics.md must hold the lines {BEGIN} and {END}", "docs/metrics.md")
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


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
