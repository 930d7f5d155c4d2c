"""What a change costs: `squadron serve` of several working trees at once, asked in turns by the same client.

    python -m tests.bench.side_by_side before=../before:serve after=.:serve gateway=.:gateway [--rounds 15]

Each side is NAME=TREE:INGRESS. All serve the demo model, on ports of their own; only one is asked at a time, so that
a machine that grows slower does so for all of them. A figure is the median over the rounds. The ratio to the first
side is the median of the ratios of each round, with the interval in which 95 % of its bootstrap samples lie.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.bench.served import OUTPUT_TOKENS, STREAMS, stream
from tests.e2e.command import Command, url_of

TIMES = {1: 4, 8: 2, 32: 1}  # how often so many streams are asked for in a round
WARM_UP = 64  # streams
SAMPLES, SEED = 2000, 1
TTFT, RATE = "first token, ms", "tokens/s"


@dataclass(slots=True)
class Side:
    """One server. figures: what, and of how many streams -> of each round."""

    name: str
    port: int
    figures: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    async def ask(self, streams: int, numbers: itertools.count[int]) -> None:
        """Measure one round."""
        firsts: list[float] = []
        began = time.perf_counter()
        for _ in range(TIMES[streams]):
            firsts += await asyncio.gather(*[stream(self.port, next(numbers)) for _ in range(streams)])
        passed = time.perf_counter() - began
        self.figures.setdefault((TTFT, streams), []).append(1e3 * statistics.median(firsts))
        self.figures.setdefault((RATE, streams), []).append(TIMES[streams] * streams * OUTPUT_TOKENS / passed)


async def compare(sides: Sequence[Side], rounds: int) -> None:
    """Ask the sides in turns; the order changes from round to round."""
    numbers = itertools.count(10_000)
    for side in sides:
        for _ in range(WARM_UP // max(STREAMS)):
            await asyncio.gather(*[stream(side.port, next(numbers)) for _ in range(max(STREAMS))])
    for number in range(rounds):
        for streams in STREAMS:
            for side in sides if number % 2 == 0 else reversed(sides):
                await side.ask(streams, numbers)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios, and the bounds of its 95 % interval."""
    ratios, rng = [one / other for one, other in zip(ours, theirs, strict=True)], Random(SEED)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(SAMPLES))
    return statistics.median(ratios), medians[SAMPLES // 40], medians[-SAMPLES // 40]


def table(sides: Sequence[Side]) -> str:
    """Lay the figures out, a line each."""
    lines = []
    for streams in STREAMS:
        for side in sides:
            for what in (TTFT, RATE):
                line = f"{side.name}, {streams} streams, {what}: {statistics.median(side.figures[what, streams]):.1f}"
                if side is not sides[0]:
                    middle, low, high = ratio(side.figures[what, streams], sides[0].figures[what, streams])
                    line += f", x{middle:.3f} ({low:.3f} to {high:.3f}) of {sides[0].name}"
                lines.append(line)
    return "\n".join(lines)


def _side(text: str) -> tuple[str, Path, str]:
    name, _, rest = text.partition("=")
    tree, _, ingress = rest.rpartition(":")
    if not name or not tree or not (Path(tree) / "deploy" / "main.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=TREE:INGRESS, such as before=../before:serve")
    return name, Path(tree).resolve(), ingress


def main() -> None:
    """Start the sides, ask them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", type=_side, nargs="+", metavar="NAME=TREE:INGRESS")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    with ExitStack() as stack:
        sides = []
        for name, tree, ingress in given.sides:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            arguments = ("serve", "demo", "--port", "0", "--ingress", ingress)
            command = Command(*arguments, home=home, folder=tree, PYTHONPATH=str(tree))
            stack.callback(command.kill)
            command.wait_for("Ctrl-C stops it")
            sides.append(Side(name, int(url_of(command).rpartition(":")[2])))
        asyncio.run(compare(sides, given.rounds))
    print(table(sides))


if __name__ == "__main__":
    main()
