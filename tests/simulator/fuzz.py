"""Runs the histories of many seeds, in several processes, and counts."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cluster.simulator.history import drawn
from tests.simulator.histories import run

BATCH = 40  # histories between two collections of garbage, and of one piece of work


@dataclass(slots=True)
class Tally:
    """What came of many histories. cpu: seconds. failed: seed -> what was wrong."""

    histories: int = 0
    over_http: int = 0
    streams: int = 0
    whole: int = 0
    cpu: float = 0.0
    failed: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add another tally to this."""
        self.histories += other.histories
        self.over_http += other.over_http
        self.streams += other.streams
        self.whole += other.whole
        self.cpu += other.cpu
        self.failed |= other.failed


def tally(seeds: Iterable[int]) -> Tally:
    """Run the histories of these seeds in this process."""
    gc.collect()
    gc.disable()  # a history leaves circles that live until it is over, and collections in between find nothing
    found, began = Tally(), time.process_time()
    try:
        for seed in seeds:
            history = drawn(seed)
            outcome = run(history)
            found.histories += 1
            found.over_http += history.ingress
            found.streams += outcome.streams
            found.whole += outcome.whole
            if outcome.violations:
                found.failed[seed] = outcome.violations
    finally:
        gc.enable()
    found.cpu = time.process_time() - began
    return found


def tallies(first: int, beyond: int | None, seconds: float | None, processes: int) -> Iterator[Tally]:
    """Yield what comes of the seeds from `first` on, piece by piece, until `beyond` or for `seconds`."""
    until = None if seconds is None else time.monotonic() + seconds

    def pieces() -> Iterator[range]:
        at = first
        while (beyond is None or at < beyond) and (until is None or time.monotonic() < until):
            end = at + BATCH if beyond is None else min(at + BATCH, beyond)
            yield range(at, end)
            at = end

    if processes == 1:
        yield from (tally(piece) for piece in pieces())
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        waiting = []
        for piece in pieces():
            waiting.append(pool.apply_async(tally, (piece,)))
            if len(waiting) >= 2 * processes:
                yield waiting.pop(0).get()
        for one in waiting:
            yield one.get()
