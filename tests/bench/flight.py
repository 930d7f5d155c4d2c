"""What the flight recorder costs: an event, a step in which somebody waits on, and a request that waits for nothing.

`python -m tests.bench.flight` prints a table. The aim is below 1 us an event and nothing measurable for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.accounts.engine_accounts import EngineAccounts
from cluster.accounts.flight_recorder import MAX_REQUESTS, FlightRecorder, Wait
from engine.events import Added, Crowded, Ended, Started
from engine.report import Finish
from engine.request import FinishReason, Request, Sequence
from engine.sampling_params import SamplingParams

EVENTS = 200_000
NAMES = [f"chatcmpl-{i:032x}@1.{16 * i}" for i in range(4 * MAX_REQUESTS)]


def each_us(act: Callable[[int], object], times: int = EVENTS) -> float:
    """Return the microseconds that `act` takes, given 0, 1, 2, ...; the least of five runs."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for i in range(times):
            act(i)
        best = min(best, time.perf_counter() - began)
    return best / times * 1e6


def full_recorder() -> FlightRecorder:
    """Return a recorder that must forget a request for each new one."""
    flight = FlightRecorder(time.monotonic)
    for name in NAMES[:MAX_REQUESTS]:
        flight.note(name, Wait.QUEUE)
    return flight


def straight_in(accounts: EngineAccounts, sequence: Sequence) -> None:
    """Let a request come and start."""
    accounts.note(Added(sequence.request, 1.0))
    accounts.note(Started(sequence, 1.0))


def measure() -> dict[str, float]:
    """Return microseconds by name."""
    flight, accounts = full_recorder(), EngineAccounts(time.monotonic)
    accounts.flight = full_recorder()
    known, someone = NAMES[MAX_REQUESTS - 1], Request("cmpl-x", (1,), SamplingParams())
    sequence = Sequence(someone, 0, 1, 1)
    end = Ended(Finish(sequence, FinishReason.STOP))
    return {
        "event of a new request": each_us(lambda i: flight.note(NAMES[i % len(NAMES)], Wait.BLOCKS)),
        "event of a known request": each_us(lambda i: flight.note(known, Wait.BLOCKS), 50),
        "step in which the first in the queue waits on": each_us(lambda _: accounts.note(Crowded(1.0))),
        "arrival and start of a request that did not wait": each_us(lambda _: straight_in(accounts, sequence)),
        "end of a request that did not wait": each_us(lambda _: accounts.note(end)),
        "look for a story where there is none": each_us(lambda _: flight.story("cmpl-x")),
        "the loop of this measurement": each_us(lambda _: None),
    }


def main() -> None:
    """Print the figures."""
    print("us".rjust(8), "")
    for name, value in measure().items():
        print(f"{value:8.3f}", name)


if __name__ == "__main__":
    main()
