"""What this process may use of its machine: cores and memory, within the container around it; and its heap.

Needs no torch.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

NO_LIMIT = 1 << 62
# How long libgomp's threads spin where they wait, in turns. Many (its default) keep a core from the thread that they
# wait for where cores are shared; none at all makes waking slow.
SPIN = {"GOMP_SPINCOUNT": "1000"}
UNIFIED = ""  # how version 2 names its one hierarchy


class ControlGroups:
    """The kernel's control groups (cgroups) around this process, of version 1 or 2: a limit of any of them holds.

    mounts: where they are mounted. own: the file that names those of this process.
    """

    def __init__(self, mounts: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> None:
        self._mounts = mounts
        self._own = own

    def cpus(self) -> float:
        """Return how many CPUs' time the quotas allow, infinity where there is none."""
        found = [_ratio(*_texts(folder, "cpu.max")) for folder in self._folders(UNIFIED)]
        found += [_ratio(*_texts(each, "cpu.cfs_quota_us", "cpu.cfs_period_us")) for each in self._folders("cpu")]
        return min(found, default=math.inf)

    def memory(self) -> int:
        """Return the bytes that the limits leave, `NO_LIMIT` where there is none."""
        found = [_left(*_texts(each, "memory.max", "memory.current")) for each in self._folders(UNIFIED)]
        version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        found += [_left(*_texts(each, *version_1)) for each in self._folders("memory")]
        return min(found, default=NO_LIMIT)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of a controller's groups around this process, the outermost first."""
        try:
            lines = self._own.read_text(encoding="utf-8").splitlines()
        except OSError:
            return  # not Linux
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controller not in controllers.split(","):
                continue
            # Within a container's own view the path may lead nowhere; the group at the top is then the container's.
            folder = self._mounts / controllers
            yield folder
            for part in PurePosixPath(path).parts[1:]:
                folder /= part
                yield folder


def cores(groups: ControlGroups | None = None) -> int:
    """Return how many cores this process may keep busy: those it may run on, within a container's quota."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = (groups or ControlGroups()).cpus()
    return mine if math.isinf(quota) else max(1, min(mine, math.ceil(quota)))


def shares_cpus(groups: ControlGroups | None = None) -> bool:
    """Whether a quota gives this process less time than the cores have that it may run on: others run there too."""
    return hasattr(os, "sched_getaffinity") and (groups or ControlGroups()).cpus() < len(os.sched_getaffinity(0))


def free_memory() -> int:
    """Return the bytes that this machine, or the container around this process, has left."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
        free = int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        pass  # not Linux: free pages are the best there is
    return min(free, ControlGroups().memory())


def _texts(folder: Path, *names: str) -> list[str]:
    """Return the words of some files, none where one is missing: the group has no such limit."""
    try:
        return [word for name in names for word in (folder / name).read_text(encoding="ascii").split()]
    except OSError:
        return []


def _ratio(quota: str = "max", period: str = "1") -> float:
    return math.inf if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


def _left(limit: str = "max", used: str = "0") -> int:
    return NO_LIMIT if limit == "max" else max(int(limit) - int(used), 0)


def collect_garbage() -> None:
    """Free all garbage now, that among what was left out of the collector's rounds as well. Takes as long as one."""
    settled = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if settled:
        gc.freeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """While entered, no round of the collector runs, where it was on.

    For imports and what else starts a process: hardly anything of that is garbage, and the rounds that it sets off
    take a tenth of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def settle_heap() -> None:
    """Collect what is garbage by now, and leave all that lives out of the collector's later rounds.

    For processes of our own, once they have started: a full round over what torch, transformers and Ray have made
    holds up every thread for half a second, and Ray asks for one whenever an actor waits for room. What is frozen and
    ends later is freed as ever, unless it is part of a cycle.
    """
    gc.collect()
    gc.freeze()
