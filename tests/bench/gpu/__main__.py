"""Check and measure everything on one GPU; nothing else may run on it.

    python -m tests.bench.gpu                                  all parts, into gpu-results.json
    python -m tests.bench.gpu --minutes 9                      as many as fit; run it again to go on
    python -m tests.bench.gpu --only limits,decode             parts by the beginnings of their names
    python -m tests.bench.gpu --table gpu-results.json         the tables of docs/gpu.md
    python -m tests.bench.gpu --device cpu --shapes tiny       proves the code where there is no GPU

Needs torch, triton, transformers, safetensors, tokenizers and numpy, and no network. On a GPU each part has a process
of its own, so that neither an error of CUDA nor memory that is not given back reaches the next one. Every figure is
written as soon as it is measured; those that have a value are not measured again without --again.

Timing: CUDA events around many calls on inputs that rotate (calls: `timing`), the host's clock around synchronised
windows of steps (engine), after warm-ups; the value is the median, the spread (largest - smallest) / median.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.bench.gpu.bench import Bench, OutOfTime
from tests.bench.gpu.catalogue import catalogue
from tests.bench.gpu.figures import Part, chosen
from tests.bench.gpu.machine import clocks, machine
from tests.bench.gpu.results import Results
from tests.bench.gpu.scale import SCALES
from tests.bench.gpu.table import tables

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns 1 when a figure failed, 2 for arguments that make no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    scale = SCALES[options.shapes]
    parts = catalogue(scale)
    try:
        if options.table is not None:
            print(tables(parts, Results.merged(options.table)), end="")
            return 0
        wanted = chosen(parts, [name for name in options.only.split(",") if name])
        results = Results(options.results)
    except ValueError as error:
        parser.error(str(error))
    device = device_named(options.device)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    bench = Bench(results, scale, device, options.models, options.again, deadline)
    apart = device.type == "cuda" and not options.here
    try:
        for part in wanted:
            if apart:
                run_apart(part, bench, options)
            else:
                _run_here(part, bench)
    except OutOfTime:
        print(f"the {options.minutes:g} minutes are over; run the same command again for the rest")
    return _closing(wanted, results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="parts by the beginnings of their names")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so many minutes")
    parser.add_argument("--again", action="store_true", help="measure what has a value too")
    parser.add_argument("--results", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--table", type=Path, nargs="*", metavar="FILE", help="print the tables of these")
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: the GPU, if there is one")
    parser.add_argument("--shapes", choices=SCALES, default="real")
    default = Path(tempfile.gettempdir()) / "squadron-gpu-models"
    parser.add_argument("--models", type=Path, default=default, help="folder for checkpoints (25 GB), kept")
    parser.add_argument("--here", action="store_true", help="measure in this process, also on a GPU")
    return parser


def device_named(name: str | None) -> torch.device:
    """Return the device by its name, a GPU with its number; None = the first GPU, or the CPU where there is none."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _run_here(part: Part, bench: Bench) -> None:
    bench.check_time()
    if bench.on_gpu:
        torch.cuda.set_device(bench.device)
    print(f"== {part.title}", flush=True)
    bench.results.begin(machine(bench.device))
    bench.run(part)
    if bench.on_gpu:
        bench.results.end({"clocks_after": clocks(bench.device.index)})


def run_apart(part: Part, bench: Bench, options: argparse.Namespace) -> None:
    """Run a part in a process of its own; what it leaves without a row gets the reason why it ended."""
    bench.check_time()
    if not bench.again and all(bench.results.done(figure.name) for figure in part.figures):
        return
    left = bench.deadline - time.monotonic()
    command = [sys.executable, "-m", "tests.bench.gpu", "--here", "--only", part.name, "--device", str(bench.device)]
    command += ["--results", str(bench.results.path), "--models", str(bench.models), "--shapes", bench.scale.name]
    command += ["--again"] * bench.again + (["--minutes", str(left / 60)] if options.minutes else [])
    before = dict(bench.results.rows)
    try:
        code = run_group(command, left if options.minutes else None)
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    finally:
        if bench.results.path.is_file():
            bench.results.reload()
    if code not in (0, FAILED):
        for figure in part.figures:
            if bench.results.rows.get(figure.name) == before.get(figure.name) and not bench.results.done(figure.name):
                bench.results.fail(figure, f"the process of this part ended with code {code}")


def run_group(command: Sequence[str], timeout: float | None) -> int:
    """Run a command and return its code. Whatever ends the wait ends the command too, with all that it started.

    Raises `subprocess.TimeoutExpired`.
    """
    # Nothing is fetched, so nothing need be waited for where there is no network.
    process = subprocess.Popen(command, start_new_session=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        return process.wait(timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _closing(parts: Sequence[Part], results: Results) -> int:
    """Say how it went. A figure that failed makes the command fail."""
    rows = [results.rows.get(figure.name) for part in parts for figure in part.figures]
    measured = sum(row is not None and row.value is not None for row in rows)
    failed = sum(row is not None and bool(row.error) for row in rows)
    skipped = sum(row is not None and bool(row.skipped) for row in rows)
    print(f"{measured} measured, {failed} failed, {skipped} skipped, {rows.count(None)} left; {results.path}")
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
