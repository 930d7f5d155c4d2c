"""Seconds from the start of a process to the first token, by phase, for a checkpoint of random weights.

`python -m tests.bench.cold_start --shape qwen3-0.6b` prints a table. The files come from the page cache.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.gpu.checkpoints import checkpoint
from tests.bench.gpu.device import device_named
from tests.bench.gpu.shapes import QWEN3_06B, REAL, tiny

TIMEOUT = 600.0
SHAPES = {shape.name: shape for shape in REAL} | {"tiny": tiny(QWEN3_06B)}


def measure_cold_start(folder: Path, device: str) -> dict[str, float]:
    """Return the seconds of each phase of one start.

    "imports" comes first, then the engine's own phases, "rest" (of loading), "first token" and "total".
    """
    found = start(folder, device)
    phases: dict[str, float] = {"imports": found["imports"], **found["phases"]}
    phases["rest"] = found["loaded"] - sum(phases.values())
    phases["first token"] = found["first_token"] - found["loaded"]
    return phases | {"total": found["first_token"]}


def start(folder: Path, device: str) -> dict[str, Any]:
    """Start an engine in a process of its own, have it draw one token, and return what `gpu.cold_start` tells.

    Raises `RuntimeError` with the last of what the process said when it failed.
    """
    _read(folder)
    command = [sys.executable, "-m", "tests.bench.gpu.cold_start", str(folder), device, str(time.time())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if run.returncode:
        raise RuntimeError(f"the engine did not start: {run.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def _read(folder: Path) -> None:
    """Bring the weights into the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            while stream.read(64 << 20):
                pass


def main() -> None:
    """Print the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda", help="cuda (the first GPU, the default), cuda:1, cpu")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be 1 or more, not {options.runs}")
    try:
        device = device_named(options.device)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as root:
        folder = checkpoint(SHAPES[options.shape], Path(root), device)
        runs = [measure_cold_start(folder, str(device)) for _ in range(options.runs)]
    for name in runs[0]:
        print(name.ljust(14), *(f"{run[name]:8.3f}" for run in runs), " s")


if __name__ == "__main__":
    # So that what ends this process, such as `timeout`, ends the engine's too, and leaves no checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
