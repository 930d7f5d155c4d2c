"""What this machine can do at most, measured for `python -m tests.bench.peers` beside the engines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from child import asked

SIDES = (1024, 2048, 4096)  # of square matrices
REPETITIONS = 10
COLUMNS = 1024


def main() -> None:
    job = asked()
    torch.set_num_threads(job.threads)
    dtype = getattr(torch, job.dtype)
    weights = (Path(job.model) / "model.safetensors").stat().st_size // 4 * dtype.itemsize  # it is in float32
    figures = {"reading_ms": 1e3 * reading(weights), "matrix_gflops": max(rate(side, dtype) for side in SIDES)}
    Path(sys.argv[2]).write_text(json.dumps({"figures": figures, "version": torch.__version__}))


def reading(size: int) -> float:
    """Return the seconds that a matrix of so many bytes takes to be read once: for its largest number, or a product.

    torch's product with a vector is at the limit of the memory on some machines, at half of it on others.
    """
    matrix, vector = torch.ones(size // 4 // COLUMNS, COLUMNS), torch.ones(COLUMNS)
    return min(least(matrix.amax), least(lambda: torch.mv(matrix, vector)))


def rate(side: int, dtype: torch.dtype) -> float:
    """Return the GFLOP/s of a product of square matrices."""
    one, other = (torch.randn(side, side).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype)
    return 2 * side**3 / least(lambda: torch.mm(one, other, out=out)) / 1e9


def least(run: Callable[[], object]) -> float:
    """Return the least of the seconds that `run` took."""
    found = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


if __name__ == "__main__":
    main()
