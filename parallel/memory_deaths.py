"""Whether the kernel may have killed a process for lack of memory: it tells only that it killed some, not which."""

from __future__ import annotations

from pathlib import Path

COUNTERS = Path("/proc/vmstat")  # linux; the line `oom_kill N` counts this machine's kills, those of cgroups included


class MemoryDeaths:
    """Counts the kernel's kills for lack of memory since it was made, where the kernel tells of them."""

    def __init__(self, counters: Path = COUNTERS) -> None:
        self._counters = counters
        self._before = _kills(counters)

    def suspicion(self) -> str:
        """Return what to add to the report of a process that was killed; "" where the kernel killed none."""
        kills = _kills(self._counters) - self._before
        if kills <= 0:
            return ""
        processes = "a process" if kills == 1 else f"{kills} processes"
        return f"; out of memory: the kernel has killed {processes} of this machine for it since the group started"


def _kills(counters: Path) -> int:
    try:
        lines = counters.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
