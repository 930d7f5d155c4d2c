"""Machines as the kernel describes them in /sys/devices/system."""

from __future__ import annotations

from pathlib import Path


def machine(folder: Path, sockets: int, cores: int, smt: int, siblings: str = "core_cpus_list") -> Path:
    """Write a machine with so many cores a socket, a node each; the CPUs of a core are numbered as usual on x86.

    Core 0 has CPU 0 and, of 64 cores with two threads each, CPU 64.
    """
    count = sockets * cores
    for cpu in range(count * smt):
        topology = folder / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / siblings).write_text(",".join(str(cpu % count + count * i) for i in range(smt)) + "\n")
    for socket in range(sockets):
        node = folder / "node" / f"node{socket}"
        node.mkdir(parents=True)
        first = socket * cores
        ranges = [f"{first + count * i}-{first + cores - 1 + count * i}" for i in range(smt)]
        (node / "cpulist").write_text(",".join(ranges) + "\n")
    return folder
