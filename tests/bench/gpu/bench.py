"""What a part of the bench works with: device, sizes, checkpoints, and rows that no other's failure spoils."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.bench.gpu.checkpoints import checkpoint
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.results import Results, Row
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.shapes import Shape

Samples = Sequence[float] | float


class NotHere(Exception):
    """Something that a figure needs is not on this machine, or not in this version; the message says what."""


class OutOfTime(Exception):
    """The minutes that were given are over; what is left is measured next time."""


@dataclass(slots=True)
class Bench:
    """One run of some parts. again: measure what has a value too. deadline: on `time.monotonic`."""

    results: Results
    scale: Scale
    device: torch.device
    models: Path
    again: bool = False
    deadline: float = float("inf")
    _figures: dict[str, Figure] = field(default_factory=dict)
    _note: str = ""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is one that CUDA events can time."""
        return self.device.type == "cuda"

    def folder(self, shape: Shape) -> Path:
        """Return the folder of a checkpoint with random weights of this shape, made now if it is not there."""
        folder = checkpoint(shape, self.models, self.device)
        if self.on_gpu:
            torch.cuda.empty_cache()  # what weights were drawn in
        return folder

    def run(self, part: Part) -> None:
        """Measure a part; what fails in it is written into its rows. Raises `OutOfTime`."""
        self._figures = {figure.name: figure for figure in part.figures}
        left = [figure.name for figure in part.figures if self.again or not self.results.done(figure.name)]
        before = dict(self.results.rows)
        try:
            part.run(self)
        except NotHere as reason:
            self._skip(self._untouched(left, before), str(reason))
        except OutOfTime:
            raise
        except Exception as error:
            self._fail(self._untouched(left, before), error)
        for name in self._untouched(left, before):
            self.results.fail(self._figures[name], "the part ended without measuring this")

    def measure(self, action: Callable[[], Samples | Sequence[Samples]], *names: str) -> None:
        """Run `action`, whose samples are those of the figure `names`, or of several, in order.

        An error is written into those rows and goes no further. What has a value is left alone. Raises `OutOfTime`.
        """
        if not self.again and all(self.results.done(name) for name in names):
            return
        self.check_time()
        self._note = ""
        try:
            found = action()
            each = [found] if len(names) == 1 else list(found)
            for name, samples in zip(names, each, strict=True):
                self._take(name, samples)
                self._note = ""
        except NotHere as reason:
            self._skip(names, str(reason))
        except OutOfTime:
            raise
        except Exception as error:
            self._fail(names, error)

    def note(self, text: str) -> None:
        """Say something of what is being measured, to be told beside it: beside the first where it is several."""
        self._note = text

    def check_time(self) -> None:
        """Raise `OutOfTime` once the minutes that were given are over."""
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def _untouched(self, names: Sequence[str], before: dict[str, Row]) -> list[str]:
        return [name for name in names if self.results.rows.get(name) is before.get(name)]

    def _take(self, name: str, samples: Samples | Sequence[Samples]) -> None:
        values = [samples] if isinstance(samples, int | float) else list(samples)
        told(self.results.take(self._figures[name], values, self._note))

    def _skip(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            told(self.results.skip(self._figures[name], reason))

    def _fail(self, names: Sequence[str], error: Exception) -> None:
        traceback.print_exception(error, limit=-8, file=sys.stderr)
        for name in names:
            told(self.results.fail(self._figures[name], f"{type(error).__name__}: {error}"[:300]))


def told(row: Row) -> None:
    """Print a row as it is written."""
    if row.value is None:
        print(f"{row.name:48} {'failed: ' + row.error if row.error else 'skipped: ' + row.skipped}", flush=True)
        return
    share = "" if row.share is None else f"  {row.share:6.1%} of {row.limit:,.4g}"
    print(f"{row.name:48} {row.value:14,.4g} {row.unit:10}{share}  {row.note}", flush=True)
