"""Cores of this machine, their hardware threads and NUMA nodes, and which of them a rank should compute on.

Source: Linux, Documentation/admin-guide/cputopology.rst. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
MOST_CPUS = 1 << 16  # far more than Linux can be built for
SIBLINGS = ("core_cpus_list", "thread_siblings_list")  # the latter before Linux 5.3


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core. number: of the first CPU, a hardware thread, that it has.

    cpus: those of its CPUs that this process may run on.
    """

    number: int
    cpus: tuple[int, ...]
    node: int = 0


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs that this thread may run on; empty where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the numbers in a list as the kernel writes them, such as 0-3,8. Raises `ValueError`."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        low = int(first)
        high = int(last) if dash else low
        if not 0 <= low <= high <= MOST_CPUS:
            raise ValueError(f"{part} is no range of CPUs")
        found.extend(range(low, high + 1))
    return tuple(found)


def format_cpus(cpus: Iterable[int]) -> str:
    """Return numbers as the kernel writes them: 0-3,8."""
    runs = groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(each) for _, each in runs)]
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ends)


def read_cores(allowed: Collection[int], system: Path = SYSTEM) -> list[Core]:
    """Return the cores that have `allowed` CPUs, in the order of their numbers.

    A CPU of which `system` does not tell its siblings is a core of its own; one without a node is on node 0.
    """
    nodes = _nodes(system)
    members: dict[int, list[int]] = {}
    for cpu in sorted(allowed):
        members.setdefault(min(_siblings(cpu, system)), []).append(cpu)
    return [Core(number, tuple(cpus), nodes.get(number, 0)) for number, cpus in sorted(members.items())]


def choose_cores(free: Sequence[Core], threads: int) -> list[Core] | None:
    """Return cores for so many threads, each with the CPUs that it should give; None where they do not suffice.

    One thread a core where there are enough, all on one node where they fit; else all CPUs of a core are used. Of
    several nodes the one with most free cores is taken, so that ranks spread over the nodes' memory.
    """
    firsts = [Core(core.number, core.cpus[:1], core.node) for core in free]
    for cores in (firsts, list(free)):
        by_node = _most_first(cores)
        for together in (by_node[0] if by_node else [], [core for node in by_node for core in node]):
            chosen = _first(together, threads)
            if chosen is not None:
                return chosen
    return None


def _most_first(cores: Sequence[Core]) -> list[list[Core]]:
    """Return the cores of each node, first the node with most CPUs, of equals the one with the lower number."""
    nodes = [[core for core in cores if core.node == node] for node in sorted({core.node for core in cores})]
    return sorted(nodes, key=lambda node: -sum(len(core.cpus) for core in node))


def _first(cores: Sequence[Core], threads: int) -> list[Core] | None:
    """Return as many cores as have `threads` CPUs, with these."""
    chosen: list[Core] = []
    left = threads
    for core in cores:
        if left == 0:
            break
        chosen.append(Core(core.number, core.cpus[:left], core.node))
        left -= len(chosen[-1].cpus)
    return chosen if left == 0 else None


def _siblings(cpu: int, system: Path) -> tuple[int, ...]:
    for name in SIBLINGS:
        try:
            return parse_cpus((system / "cpu" / f"cpu{cpu}" / "topology" / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return (cpu,)


def _nodes(system: Path) -> dict[int, int]:
    """Return the node of each CPU."""
    found: dict[int, int] = {}
    for folder in (system / "node").glob("node[0-9]*"):
        try:
            cpus = parse_cpus((folder / "cpulist").read_text(encoding="ascii"))
        except (OSError, ValueError):  # a node of memory alone has no CPUs
            continue
        found |= dict.fromkeys(cpus, int(folder.name.removeprefix("node")))
    return found
