"""The tests of `tests/gpu` as parts of a run: each file a process, what became of each test on disk as it is known.

Those of kernels take little memory and time nothing: they run side by side, which compiles on all cores. A test that
hangs or kills its process is told and the others of its file still run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.bench.gpu.bench import Bench, NotHere, OutOfTime
from tests.bench.gpu.figures import Figure, Part
from tests.gpu.outcomes import BEGAN, FAILED, PASSED, SKIPPED, Outcome, read

FOLDER = Path(__file__).parents[2] / "gpu"
KERNELS = ("attention", "small_kernels", "sampler", "quantised", "library_attention", "sharded_draw", "recurrent")
ENGINE = ("graphs", "overlap", "sleep", "batch_invariance", "loading", "symmetric")
FOOTPRINT = ("footprint",)  # takes nearly all memory
SIDE_BY_SIDE = 6  # processes at most, with 2 cores each


class ChecksFailed(Exception):
    """Some tests failed; the message names them."""


def parts() -> tuple[Part, Part, Part]:
    """Return the checks of the kernels, of the engine around them, and of the plan of its memory."""
    jobs = max(1, min(SIDE_BY_SIDE, (os.cpu_count() or 1) // 2))
    return (
        _part("checks-kernels", "Checks of the kernels", KERNELS, jobs),
        _part("checks-engine", "Checks of graphs, overlapped steps, sleep and loading", ENGINE, 1),
        _part("checks-footprint", "Check of the plan of memory", FOOTPRINT, 1),
    )


def _part(stem: str, title: str, names: Sequence[str], jobs: int) -> Part:
    figures = tuple(
        Figure(f"{stem}/{name}", f"tests of `tests/gpu/test_{name}.py` that passed", "tests") for name in names
    )
    return Part(stem, title, figures, lambda bench: _run(bench, stem, names, jobs))


def _run(bench: Bench, stem: str, names: Sequence[str], jobs: int) -> None:
    if not bench.on_gpu:
        raise NotHere("needs a CUDA device")
    path = bench.results.path
    outcomes = path.with_name(f"{path.stem}.{stem}.jsonl")
    if bench.again:
        outcomes.unlink(missing_ok=True)
    left = [name for name in names if bench.again or not bench.results.done(f"{stem}/{name}")]
    with _started(bench, left, outcomes, jobs) as running:
        for name in left:
            try:
                bench.measure(running[name].result, f"{stem}/{name}")
            finally:
                bench.results.copy(outcomes)


@contextmanager
def _started(bench: Bench, names: Sequence[str], outcomes: Path, jobs: int) -> Iterator[dict[str, Future[int]]]:
    """Run the files, `jobs` at a time; what has not begun when the block ends is left out."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield {name: pool.submit(passed, FOLDER / f"test_{name}.py", outcomes, bench.deadline) for name in names}
    finally:
        pool.shutdown(cancel_futures=True)


def passed(file: Path, outcomes: Path, deadline: float = float("inf")) -> int:
    """Run the tests of a file that have not passed by `outcomes`; return how many have by then.

    Raises `ChecksFailed` naming those that failed or ended the process, `NotHere` where all were skipped, and
    `OutOfTime`.
    """
    lost: list[str] = []  # ended their process, so that it is started again for those behind them
    while True:
        before = _known(file, outcomes)
        code = _pytest(file, outcomes, [*lost, *(_failed_now(before, lost))] if lost else [], deadline)
        known = _known(file, outcomes)
        ended = [one.test for one in known if one.outcome == BEGAN and one.test not in lost]
        if not ended:
            break
        lost += ended
    return _told(file, known, code)


def _failed_now(known: Sequence[Outcome], lost: Sequence[str]) -> list[str]:
    """Return what failed in a run that another test ended: it need not fail again to be told."""
    return [one.test for one in known if one.outcome == FAILED and one.test not in lost]


def _known(file: Path, outcomes: Path) -> list[Outcome]:
    return [one for one in read(outcomes).values() if one.test.partition("::")[0] == file.name]


def _pytest(file: Path, outcomes: Path, without: Sequence[str], deadline: float) -> int:
    # With "=": else pytest takes the file for one of tests, and the settings beside it for those of the tests.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--outcomes={outcomes}", str(file)]
    command += [f"--deselect={test}" for test in without]
    left = deadline - time.monotonic()
    try:  # in this process's group, so that who ends that ends it too
        return subprocess.run(command, timeout=None if left == float("inf") else max(left, 0), check=False).returncode
    except subprocess.TimeoutExpired:
        raise OutOfTime from None


def _told(file: Path, known: Sequence[Outcome], code: int) -> int:
    bad = [one for one in known if one.outcome in (FAILED, BEGAN)]
    good = sum(one.outcome == PASSED for one in known)
    if bad:
        told = "; ".join(f"{one.test.partition('::')[2]}: {one.reason or 'ended its process'}" for one in bad)
        raise ChecksFailed(f"{len(bad)} of {len(known)}: {told}")
    if not known or (code not in (0, 5) and not good):  # 5: nothing was left to be run
        raise ChecksFailed(f"pytest ended with code {code} for {file.name}")
    if not good:
        raise NotHere(next(one.reason for one in known if one.outcome == SKIPPED))
    return good
