"""The file of results: one row per figure, and what it was measured on. An interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tests.bench.gpu.figures import Figure
from tests.bench.gpu.limits import GIVEN, Limits


@dataclass(frozen=True, slots=True)
class Row:
    """One figure as it was measured, or why it was not.

    value: median of `n` samples. spread: (largest - smallest) / median. limit: what the given rates allow; share: of
    it that was reached; measured_limit, measured_share: the same with the rates measured on this machine.
    error: what failed. skipped: what is not here to be measured. run: index of the run's machine and time.
    """

    name: str
    unit: str
    value: float | None = None
    n: int = 0
    spread: float | None = None
    limit: float | None = None
    share: float | None = None
    measured_limit: float | None = None
    measured_share: float | None = None
    note: str = ""
    error: str = ""
    skipped: str = ""
    run: int = 0


class Results:
    """Rows by name. Every change is on disk at once."""

    def __init__(self, path: Path, also: Path | None = None) -> None:
        """Read what is there. also: folder that gets a copy of each change, where only that comes back of a machine.

        Raises `ValueError` when it is no file of results, or no folder.
        """
        self.path = path
        self._also = also
        self.runs: list[dict[str, Any]] = []
        self.rows: dict[str, Row] = {}
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"{path}: no file can be there for results; try gpu-results.json")
        if also is not None and not also.is_dir():
            raise ValueError(f"--also {also}: there is no such folder; make it, or leave the flag out")
        if path.is_file():
            self._read()

    @classmethod
    def merged(cls, paths: Sequence[Path], shapes: str) -> Self:
        """Return what several files hold, for reading only; of a figure that several have, the last one's.

        Raises `ValueError` for a path that is no file of results, or one of other shapes.
        """
        whole = cls(Path(os.devnull))
        for path in paths:
            if not path.is_file():
                raise ValueError(f"--table {path}: there is no such file")
            one = cls(path)
            one.check(shapes)
            whole.rows |= {
                name: Row(**asdict(row) | {"run": row.run + len(whole.runs)}) for name, row in one.rows.items()
            }
            whole.runs += one.runs
        return whole

    def check(self, shapes: str, device: str | None = None) -> None:
        """Raise `ValueError` for other shapes or another kind of device, whose figures have the same names."""
        for run in self.runs:
            size, kind = run.get("shapes", shapes), run.get("device", "").partition(":")[0]
            if size != shapes or (device and kind and kind != device):
                works = f"another file, or --shapes {size}" + (f" --device {kind}" if kind else "")
                raise ValueError(f"{self.path}: holds figures of {size} shapes on {kind}; try {works}")

    def reload(self) -> None:
        """Take what another process wrote."""
        self._read()

    def begin(self, machine: Mapping[str, Any]) -> None:
        """Start a run: rows that follow were measured on this machine, at this time."""
        self.runs.append(dict(machine))

    def end(self, more: Mapping[str, Any]) -> None:
        """Say more of the run that ends."""
        self.runs[-1] |= more
        self._write()

    def done(self, name: str) -> bool:
        """Whether a figure has a value."""
        row = self.rows.get(name)
        return row is not None and row.value is not None

    def measured(self) -> Limits | None:
        """Return the rates of this machine, where they were measured."""
        copy, product = (self.rows.get(name) for name in ("limits/copy", "limits/bf16"))
        if copy is None or product is None or copy.value is None or product.value is None:
            return None
        return Limits(copy.value * 1e12, product.value * 1e12)

    def share_here(self, figure: Figure) -> float | None:
        """Return what was reached of the limit by measured rates, also where another file of such a GPU has those."""
        row, measured, limits = self.rows[figure.name], self.measured(), self.rows.get("limits/copy")
        if row.measured_share is not None or row.value is None or figure.limit is None or not (measured and limits):
            return row.measured_share
        gpus = [self.runs[each.run].get("gpu") for each in (row, limits) if each.run < len(self.runs)]
        return _share(row.value, figure.limit(measured), figure.higher) if len(set(gpus)) == 1 else None

    def take(self, figure: Figure, samples: Sequence[float], note: str = "") -> Row:
        """Write a figure: the median of its samples beside what the hardware allows."""
        value = statistics.median(samples)
        spread = (max(samples) - min(samples)) / abs(value) if value and len(samples) > 1 else None
        measured = self.measured()
        limit = figure.limit(GIVEN) if figure.limit else None
        here = figure.limit(measured) if figure.limit and measured else None
        row = Row(
            figure.name,
            figure.unit,
            value,
            len(samples),
            spread,
            limit,
            _share(value, limit, figure.higher),
            here,
            _share(value, here, figure.higher),
            note,
            run=self._run,
        )
        return self._put(row)

    def fail(self, figure: Figure, error: str) -> Row:
        """Write what kept a figure from being measured."""
        return self._put(Row(figure.name, figure.unit, error=error, run=self._run))

    def skip(self, figure: Figure, reason: str) -> Row:
        """Write what is not here that the figure needs."""
        return self._put(Row(figure.name, figure.unit, skipped=reason, run=self._run))

    @property
    def _run(self) -> int:
        return max(len(self.runs) - 1, 0)

    def _put(self, row: Row) -> Row:
        self.rows[row.name] = row
        self._write()
        return row

    def _write(self) -> None:
        text = json.dumps({"runs": self.runs, "rows": [asdict(row) for row in self.rows.values()]}, indent=1)
        whole = self.path.with_name(self.path.name + ".part")
        whole.write_text(text + "\n", encoding="utf-8")
        whole.replace(self.path)
        self.copy(self.path)

    def copy(self, path: Path) -> None:
        """Let the folder for copies, where there is one, have this file as well."""
        if self._also is not None and path.is_file():
            shutil.copyfile(path, self._also / path.name)

    def _read(self) -> None:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            self.runs = data["runs"]
            self.rows = {row["name"]: Row(**row) for row in data["rows"]}
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}: no file of results of this bench: {error!r}") from error


def _share(value: float, limit: float | None, higher: bool) -> float | None:
    if not limit or not value:
        return None
    return value / limit if higher else limit / value
