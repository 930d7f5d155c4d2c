"""What a client sees of kill -9: the comparison that a user would make, and the long form with random kills.

    python -m tests.bench.kills [--runs 3] [--streams 32] [--tokens 200]     one replica killed after a second
    python -m tests.bench.kills --kills 200 [--seed 1] [--streams 32]        random kills under streams without end
    python -m tests.bench.kills --kills 200 --victims replica,rank,router    with two routers, which are killed too
    python -m tests.bench.kills --faults stall,cut --kills 100               the same with other faults than kills
    python -m tests.bench.kills --kills 200 --ingress gateway                behind gateways of ours
    python -m tests.bench.kills --kills 1000 --minutes 60                    so many, or as many as the time allows

The demo model, two replicas, each a tensor-parallel pair, behind a real Serve proxy, or a gateway, on loopback. Every
stream is compared, token by token, with an undisturbed run. `short` is a 200 that just ends, without an error and
without a finish reason: what a client takes for an answer. `back` is the time until all replicas serve again.

Faults: `kill` of a replica or rank; `stall`, one of these or a router is stopped (SIGSTOP) for 2 to 10 s, a router
for 6 at most; `cut`, nothing comes through between a router and all replicas for 2 to 10 s. Without a kill every
stream must be whole and the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from cluster.config_values import GATEWAY, SERVE
from tests.bench.machine import provenance
from tests.bench.random_faults import CUT, KILL, KINDS
from tests.bench.random_kills import RandomKiller
from tests.bench.siege import DIFFERS, RANK, REPLICA, ROUTER, SAME, VICTIMS, until_back, verdict
from tests.bench.switchboard import Switchboard
from tests.chaos.streams import BROKEN, ERROR, HANG, SHORT, WHOLE, client_of, greedy_or_seeded, read_all
from tests.e2e.harness import App, deploy, free_port, kill, replica_processes, start_ray, start_serve

KILL_AFTER = 1.0  # seconds
BACK_AT_MOST = 20.0  # seconds until all replicas serve again


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run: streams by what became of them. back_s: until all replicas served again.

    next_token_s: the longest that any stream under way waited, from the kill to its next token.
    """

    same: int
    differs: int
    error: int
    cut: int
    short: int
    hang: int
    back_s: float
    next_token_s: float


@contextmanager
def served_demo(board: Switchboard | None = None, **settings: Any) -> Iterator[App]:
    """A Ray and an app of our own: two replicas of the demo model, each a tensor-parallel pair.

    board: what the links between routers and replicas go through.
    """
    import ray
    from ray import serve

    start_ray(runtime_env=board.runtime_env if board is not None else None)
    try:
        defaults = {"model": "demo", "replicas": 2, "tensor_parallel_size": 2, "cpus_per_worker": 0.5}
        port = free_port() if settings.get("ingress") == GATEWAY else start_serve()
        yield deploy(port, **defaults | settings)
    finally:
        serve.shutdown()
        ray.shutdown()


async def compare_once(app: App, streams: int, tokens: int) -> Comparison:
    """Run the streams undisturbed, then again with a replica killed after a second."""
    asked = [greedy_or_seeded(index, tokens) for index in range(streams)]
    async with client_of(app.url) as client:
        oracle = await read_all(client, asked)
        if failed := [stream.error for stream in oracle if stream.kind != WHOLE]:
            raise RuntimeError(f"the undisturbed run failed: {failed[:3]}")
        running = asyncio.create_task(read_all(client, asked))
        await asyncio.sleep(KILL_AFTER)
        victim = replica_processes()[0]
        killed_at = time.monotonic()
        kill(victim)
        back = asyncio.create_task(until_back(app, victim.pid, killed_at))
        disturbed = await running
    if all(stream.times[-1:] < [killed_at] for stream in disturbed):
        raise RuntimeError("all streams ended before the kill: ask for more tokens")
    count = Counter(verdict(stream, same) for stream, same in zip(disturbed, oracle, strict=True))
    waits = [wait for stream in disturbed if (wait := stream.longest_wait(killed_at)) is not None]
    outcomes = (count[SAME], count[DIFFERS], count[ERROR], count[BROKEN], count[SHORT], count[HANG])
    return Comparison(*outcomes, await back, max(waits, default=0.0))


def comparison_table(runs: Sequence[Comparison]) -> Table:
    """Lay out the runs."""
    ends = ("whole and same", "differs", "error", "cut off", "silently short", "hanging")
    names = (*ends, "all replicas back", "next token")
    table = Table("run", *(Column(name, justify="right") for name in names), title="kill -9 of a replica after 1 s")
    for number, run in enumerate(runs, start=1):
        counts = (run.same, run.differs, run.error, run.cut, run.short, run.hang)
        table.add_row(str(number), *map(str, counts), f"{run.back_s:.1f} s", f"{run.next_token_s:.2f} s")
    return table


def figures_table(figures: dict[str, Any], title: str = "random kills") -> Table:
    """Lay out a report."""
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    return table


def _kinds(text: str) -> tuple[str, ...]:
    return _some_of(KINDS, text)


def _victims(text: str) -> tuple[str, ...]:
    return _some_of(tuple(VICTIMS), text)


def _some_of(known: tuple[str, ...], text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := [kind for kind in kinds if kind not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return kinds


def main() -> None:
    """Run, print, and fail where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--kills", type=int, default=0, help="so many random faults instead of the comparison")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no fault is begun after so many")
    parser.add_argument("--faults", type=_kinds, default=(KILL,), help=f"kinds of them: some of {','.join(KINDS)}")
    named = f"kinds of processes to kill: some of {','.join(sorted(VICTIMS))}"
    parser.add_argument("--victims", type=_victims, default=(REPLICA, RANK), help=named)
    parser.add_argument("--ingress", choices=(SERVE, GATEWAY), default=SERVE, help="what holds the connections")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if options.faults != (KILL,) and not options.kills:
        parser.error("--faults needs --kills, the number of faults, such as --kills 100")
    if ROUTER in options.victims and not options.kills:
        parser.error("--victims router needs --kills, the number of kills, such as --kills 100")
    routers = {"routers": 2} if ROUTER in options.victims else {}
    with ExitStack() as stack:
        board = stack.enter_context(Switchboard()) if CUT in options.faults else None
        app = stack.enter_context(served_demo(board, ingress=options.ingress, **routers))
        if options.kills:
            run = options.kills, options.streams, options.tokens, options.seed, options.faults
            report = asyncio.run(RandomKiller(app, *run, board, options.victims).run(60 * options.minutes))
            figures, least = report.figures(), 0.99 if KILL in options.faults else 1.0
            table = figures_table(figures, f"random faults: {', '.join(options.faults)}")
            kept = report.promise_kept and report.exact_share >= least
        else:
            runs = [asyncio.run(compare_once(app, options.streams, options.tokens)) for _ in range(options.runs)]
            figures = {"runs": [asdict(run) for run in runs]}
            table = comparison_table(runs)
            kept = all(run.same == options.streams and run.back_s <= BACK_AT_MOST for run in runs)
    Console().print(table)
    if options.output:
        options.output.write_text(json.dumps(provenance() | figures, indent=2) + "\n")
    sys.exit(None if kept else "a stream was not whole and the same, or a replica came back late: see the table")


if __name__ == "__main__":
    main()
