"""`python -m deploy.chart` writes what the chart has of these descriptions; `--check` tells what is stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.chart.schema import values_schema
from deploy.chart.table import with_table
from deploy.chart.values_file import group_text, values_text

CHART = Path(__file__).parents[2] / "helm" / "squadron"


def chart_files(folder: Path) -> dict[Path, str]:
    """Return what the written files of the chart in `folder` should hold."""
    readme = folder / "README.md"
    return {
        folder / "values.schema.json": json.dumps(values_schema(), indent=2) + "\n",
        folder / "values.yaml": values_text(),
        folder / "defaults" / "worker-group.yaml": group_text(),
        readme: with_table(readme.read_text(encoding="utf-8")),
    }


def stale_files(folder: Path) -> list[Path]:
    """Return the files that are missing or hold something else."""
    return [path for path, text in chart_files(folder).items() if not _holds(path, text)]


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def write(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; say what is stale, with exit code 1.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="The chart.")] = CHART,
) -> None:
    """Write values.schema.json, values.yaml and the README's table of values."""
    stale = stale_files(folder)
    for path in stale:
        if not check:
            path.write_text(chart_files(folder)[path], encoding="utf-8")
        print(f"{'stale' if check else 'written'}: {path}")
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(write)
