"""`python -m deploy.chart` writes the schema, values, tables, dashboards, alerts; `--check` says what is stale.

They are written because each repeats something that has one source: values.yaml, its schema and the README's tables
are views of the same models, which share the flags' settings; dashboards and alerts may only ask for metrics that
the table of families has. By hand the copies would part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from deploy.chart.files import app_text, dashboard_files, group_text, rules_file, values_text, with_table
from deploy.chart.schema import values_schema
from deploy.observability.alerts import EVERYTHING, RELEASE, TTFT_MARK, TTFT_SECONDS

OBSERVABILITY = Path(__file__).parents[1] / "observability"
CHART = Path(__file__).parents[2] / "helm" / "squadron"


def chart_files(folder: Path) -> dict[Path, str]:
    """Return what the written files of the chart in `folder` should hold."""
    readme = folder / "README.md"
    return {
        folder / "values.schema.json": json.dumps(values_schema(), indent=2) + "\n",
        folder / "values.yaml": values_text(),
        folder / "defaults" / "worker-group.yaml": group_text(),
        folder / "defaults" / "app.yaml": app_text(),
        readme: with_table(readme.read_text(encoding="utf-8")),
        **dashboard_files(folder),
        **rules_file(folder / "alerts", TTFT_MARK, RELEASE),
    }


def shipped_files(folder: Path) -> dict[Path, str]:
    """Return what `folder` should hold for those who run no chart: rules for Prometheus."""
    return rules_file(folder, f"{TTFT_SECONDS:g}", EVERYTHING)


def stale_files(files: Mapping[Path, str]) -> list[Path]:
    """Return the files that are missing or hold something else."""
    return [path for path, text in files.items() if not _holds(path, text)]


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def write(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; say what is stale, with exit code 1.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="The chart.")] = CHART,
    observability: Annotated[Path, typer.Option(help="Where the rules for Prometheus are.")] = OBSERVABILITY,
) -> None:
    """Write values.schema.json, values.yaml, the README's table of values, dashboards and alerts."""
    files = chart_files(folder) | shipped_files(observability)
    stale = stale_files(files)
    for path in stale:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        print(f"{'stale' if check else 'written'}: {path}")
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(write)
