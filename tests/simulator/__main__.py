"""`python -m tests.simulator`: runs histories of a simulated cluster under faults; prints the shortest that fails.

--seeds A:B     the histories of these seeds
--minutes N     fresh seeds for so long (the default: one minute)
--seed S        one history; what happens in it is printed
--processes N   at a time; 2
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from cluster.simulator.history import History, drawn
from tests.simulator.fuzz import Tally, tallies
from tests.simulator.histories import run
from tests.simulator.shrink import as_test, shrunk

SHOWN = 3  # failing seeds that are made short


def main(args: list[str]) -> int:
    """Run what the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(
        "python -m tests.simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=_span, default=None, metavar="A:B")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(args)
    if given.seed is not None:
        return _one(given.seed)
    first, beyond = given.seeds or (secrets.randbits(40), None)
    seconds = None if given.seeds else 60 * given.minutes
    print(f"seeds from {first} on", flush=True)
    total, began = Tally(), time.monotonic()
    for tally in tallies(first, beyond, seconds, given.processes):
        for seed, violations in tally.failed.items():
            print(f"seed {seed}: {'; '.join(violations)[:600]}", flush=True)
        total.add(tally)
    passed = time.monotonic() - began
    rate, of_cpu = 60 * total.histories / passed, 60 * total.histories / total.cpu
    print(
        f"{total.histories} histories ({total.over_http} over HTTP), {total.streams} streams ({total.whole} whole), "
        f"{len(total.failed)} with violations; {passed:.0f} s, {rate:.0f} histories a minute "
        f"in {given.processes} processes, {of_cpu:.0f} a minute of CPU time"
    )
    for seed in list(total.failed)[:SHOWN]:
        _show(drawn(seed))
    return 1 if total.failed else 0


def _span(text: str) -> tuple[int, int]:
    first, _, beyond = text.partition(":")
    return int(first), int(beyond)


def _one(seed: int) -> int:
    history = drawn(seed)
    outcome = run(history)
    print(as_test(history))
    print(f"{outcome.streams} streams, {outcome.whole} whole, {outcome.seconds:.2f} s, trace {outcome.trace}")
    for violation in outcome.violations:
        print(violation)
    if outcome.violations:
        _show(history)
    return 1 if outcome.violations else 0


def _show(history: History) -> None:
    short = shrunk(history, lambda one: bool(run(one).violations))
    print(f"\n# {'; '.join(run(short).violations)[:300]}\n{as_test(short)}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
