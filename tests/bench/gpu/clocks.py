"""What `nvidia-smi` says of a GPU's clocks: once, and while it works."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

ASKED = (
    "name",
    "driver_version",
    "pstate",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "ecc.mode.current",
)
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # as new drivers say it, and old ones
WATCHED = ("utilization.gpu", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
UNITS = {"clocks.sm": " MHz", "clocks.mem": " MHz", "power.draw": " W", "temperature.gpu": " C"}
EVERY = 2  # seconds
BUSY = 50  # percent of the time that a GPU has worked: clocks of one that waits tell nothing


def clocks(index: int) -> dict[str, str]:
    """Return what there is to say of clocks, power, heat and what holds clocks down; {} where there is none."""
    for reasons in REASONS:
        asked = (*ASKED, reasons)
        try:
            run = subprocess.run(_query(index, asked), capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return dict(zip(asked, (value.strip() for value in run.stdout.split(",")), strict=False))
    return {}


@contextlib.contextmanager
def watched(index: int, reasons: str) -> Iterator[dict[str, str]]:
    """Give what clocks were while a GPU worked in the block; it is there when the block has ended.

    reasons: how this driver calls what holds clocks down. A process of its own asks: nothing here waits for it.
    """
    found: dict[str, str] = {}
    query = [*_query(index, (*WATCHED, reasons)), f"--loop={EVERY}"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as told:
        try:
            process = subprocess.Popen(query, stdout=told, stderr=subprocess.DEVNULL)
        except OSError:
            yield found
            return
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            told.seek(0)
            found |= ranges(told.read(), reasons)


def ranges(text: str, reasons: str) -> dict[str, str]:
    """Return the least and the largest of what was told while the GPU worked, and all reasons; {} if it never did."""
    rows = [dict(zip((*WATCHED, reasons), line.split(", "), strict=False)) for line in text.splitlines()]
    busy = [row for row in rows if reasons in row and (_number(row["utilization.gpu"]) or 0) >= BUSY]
    if not busy:
        return {}
    found = {}
    for name, unit in UNITS.items():
        values = [value for value in (_number(row[name]) for row in busy) if value is not None]
        if values:
            found[name] = f"{min(values):g} to {max(values):g}{unit}"
    return found | {reasons: " ".join(sorted({row[reasons] for row in busy})), "readings": str(len(busy))}


def _query(index: int, asked: Sequence[str]) -> list[str]:
    return ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]


def _number(text: str) -> float | None:
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return None
