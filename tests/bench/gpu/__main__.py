"""Check and measure everything on one GPU; nothing else may run on it.

    python -m tests.bench.gpu                                  all parts, into gpu-results.json
    python -m tests.bench.gpu --minutes 9                      as many as fit; run it again to go on
    python -m tests.bench.gpu --only limits,decode             parts by the beginnings of their names
    python -m tests.bench.gpu --table gpu-results.json         the tables of docs/gpu.md
    python -m tests.bench.gpu --device cpu --shapes tiny --results tiny-results.json
                                                               proves the code where there is no GPU

Needs torch, triton, transformers, safetensors, tokenizers and numpy, and no network. On a GPU each part has a process
of its own, so that neither an error of CUDA nor memory that is not given back reaches the next one. Every figure is
written as soon as it is measured; those that have a value are not measured again without --again.

Timing: CUDA events around many calls on inputs that rotate (kernels), the host's clock around windows of steps that
follow each other (engine), after warm-ups; the value is the median, the spread (largest - smallest) / median.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.bench.gpu.bench import Bench, OutOfTime, told
from tests.bench.gpu.catalogue import catalogue
from tests.bench.gpu.child import run_group
from tests.bench.gpu.clocks import REASONS, clocks, watched
from tests.bench.gpu.device import device_named
from tests.bench.gpu.figures import Part, chosen
from tests.bench.gpu.machine import machine
from tests.bench.gpu.results import Results
from tests.bench.gpu.scale import SCALES
from tests.bench.gpu.shapes import REAL
from tests.bench.gpu.table import tables

FAILED = 1
GRACE = 20.0  # seconds that a part has to end what it was at when the minutes were over
INTERRUPTED = 130  # as shells say it
WITHOUT_GPU = "--device cpu --shapes tiny, which proves the code and measures nothing"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns 1 when a figure failed or has no row though there was time.

    Arguments that make no sense end the process with 2, before anything is measured.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    scale = SCALES[options.shapes]
    parts = catalogue(scale)
    try:
        if options.table is not None:
            print(tables(parts, Results.merged(options.table, scale.name)), end="")
            return 0
        wanted = chosen(parts, [name for name in options.only.split(",") if name])
        results = Results(options.results, options.also)
        device = device_named(options.device, WITHOUT_GPU)
        _check(options, device)
        results.check(scale.name, device.type)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    bench = Bench(results, scale, device, options.models, options.again, deadline)
    apart = device.type == "cuda" and not options.here
    in_time = True
    try:
        for part in wanted:
            if apart:
                run_apart(part, bench, options)
            else:
                _run_here(part, bench)
    except OutOfTime:
        in_time = False
        print(f"the {options.minutes:g} minutes are over; run the same command again for the rest")
    except KeyboardInterrupt:
        print("interrupted; run the same command again for the rest", file=sys.stderr)
        return INTERRUPTED
    return _closing(wanted, results, in_time)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="parts by the beginnings of their names")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so many, and end soon")
    parser.add_argument("--again", action="store_true", help="measure what has a value too, from the start")
    results = Path("gpu-results.json")
    parser.add_argument("--results", type=Path, default=results, help=f"where rows are kept (default: {results})")
    parser.add_argument("--also", type=Path, metavar="FOLDER", help="gets a copy of the results at every change")
    parser.add_argument("--table", type=Path, nargs="*", metavar="FILE", help="print the tables of these")
    parser.add_argument("--device", default="cuda", help="cuda (the first GPU, the default), cuda:1, cpu")
    parser.add_argument("--shapes", choices=SCALES, default="real", help="real (the default), or tiny, for a CPU")
    default = Path(tempfile.gettempdir()) / "squadron-gpu-models"
    size = sum(shape.stored_weights for shape in REAL) * 2 / 1e9  # bf16
    parser.add_argument("--models", type=Path, default=default, help=f"folder for checkpoints ({size:.0f} GB), kept")
    parser.add_argument("--here", action="store_true", help="measure in this process, also on a GPU")
    return parser


def _check(options: argparse.Namespace, device: torch.device) -> None:
    """Raise `ValueError` for what would only be noticed after hours, or never."""
    if options.minutes is not None and not options.minutes > 0:
        raise ValueError(f"--minutes {options.minutes:g}: must be above 0, such as 9; without it there is no end")
    if device.type == "cpu" and options.shapes == "real":
        raise ValueError("--device cpu: real shapes would take it days and tell nothing of a GPU; add --shapes tiny")


def _run_here(part: Part, bench: Bench) -> None:
    bench.check_time()
    if bench.on_gpu:
        torch.cuda.set_device(bench.device)
    print(f"== {part.title}", flush=True)
    bench.results.begin(machine(bench.device) | {"shapes": bench.scale.name})
    if bench.on_gpu:
        _run_watched(part, bench)
    else:
        bench.run(part)


def _run_watched(part: Part, bench: Bench) -> None:
    before, index = bench.results.runs[-1]["clocks"], bench.device.index
    during: dict[str, str] = {}
    try:
        with watched(index, next((name for name in REASONS if name in before), REASONS[0])) as during:
            bench.run(part)
    finally:
        bench.results.end({"clocks_during": during, "clocks_after": clocks(index)})


def run_apart(part: Part, bench: Bench, options: argparse.Namespace) -> None:
    """Run a part in a process of its own; what it leaves without a row gets the reason why it ended."""
    bench.check_time()
    if not bench.again and all(bench.results.done(figure.name) for figure in part.figures):
        return
    left = bench.deadline - time.monotonic()
    command = [sys.executable, "-m", "tests.bench.gpu", "--here", "--only", part.name, "--device", str(bench.device)]
    command += ["--results", str(bench.results.path), "--models", str(bench.models), "--shapes", bench.scale.name]
    command += ["--also", str(options.also)] if options.also else []
    command += ["--again"] * bench.again + (["--minutes", str(left / 60)] if options.minutes else [])
    names = [figure.name for figure in part.figures if bench.again or not bench.results.done(figure.name)]
    before = dict(bench.results.rows)
    try:
        ended = run_group(command, left + GRACE if options.minutes else None)
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    finally:
        if bench.results.path.is_file():
            bench.results.reload()
    bench.check_time()  # else the process wrote every row, or died
    for figure in part.figures:
        if figure.name in names and bench.results.rows.get(figure.name) == before.get(figure.name):
            told(bench.results.fail(figure, str(ended)[:300]))


def _closing(parts: Sequence[Part], results: Results, in_time: bool) -> int:
    """Say how it went. A figure that failed makes the command fail, and one that is left though there was time."""
    rows = [results.rows.get(figure.name) for part in parts for figure in part.figures]
    measured = sum(row is not None and row.value is not None for row in rows)
    failed = sum(row is not None and bool(row.error) for row in rows)
    skipped = sum(row is not None and bool(row.skipped) for row in rows)
    left = rows.count(None)
    print(f"{measured} measured, {failed} failed, {skipped} skipped, {left} left; {results.path}")
    return FAILED if failed or (left and in_time) else 0


if __name__ == "__main__":
    # So that what ends this process, such as `timeout`, ends the part's too, which would hold the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
