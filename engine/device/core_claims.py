"""Hands out the cores of a machine to processes that know nothing of each other.

Who claims a core holds a lock on a file of its number, which the kernel frees when the process ends, however it ends.
Only processes of one user that see the same folder know of each other's claims: other users, and other containers on
the same host, do not. Needs no torch.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.device.topology import SYSTEM, Core, allowed_cpus, choose_cores, format_cpus, read_cores
from parallel.c_library import is_private
from parallel.file_lock import locked

LOCK_TIMEOUT = 10.0  # seconds; to claim takes milliseconds, unless a process was stopped in the middle of it

Choice = Callable[[Sequence[Core]], list[Core] | None]  # of the cores that nobody has claimed


class UnclaimedError(Exception):
    """Cores cannot be claimed; the text says why."""


class Claim:
    """Cores that this process has for itself. cpus: one for each thread. nodes: where they are."""

    def __init__(self, chosen: Sequence[Core], locks: ExitStack) -> None:
        self.cpus = frozenset(cpu for core in chosen for cpu in core.cpus)
        self.nodes = frozenset(core.node for core in chosen)
        self._locks = locks

    def __str__(self) -> str:
        nodes = f"NUMA node{'s' if len(self.nodes) > 1 else ''} {format_cpus(self.nodes)}"
        return f"CPU{'s' if len(self.cpus) > 1 else ''} {format_cpus(self.cpus)} of {nodes}"

    def release(self) -> None:
        """Let others have the cores. Can be called twice."""
        self._locks.close()


class CoreRegistry:
    """The cores of this machine that this process may run on, and who has claimed them.

    allowed: CPUs; None = those of this thread. folder: of the claims; None = this user's. system: where the kernel
    tells of the machine.
    """

    def __init__(
        self, allowed: frozenset[int] | None = None, folder: Path | None = None, system: Path = SYSTEM
    ) -> None:
        self.cores = read_cores(allowed_cpus() if allowed is None else allowed, system)
        # Not TMPDIR nor XDG_RUNTIME_DIR: all processes of a user must mean the same folder.
        self._folder = folder or Path("/tmp") / f"squadron-{os.getuid()}" / "cores"  # noqa: S108

    def claim(self, threads: int) -> Claim:
        """Claim cores for so many threads, as `choose_cores` chooses. Raises `UnclaimedError`."""
        return self._claim(
            lambda free: choose_cores(free, threads),
            f"{threads} of {len(self.cores)} cores are wanted, and other processes have claimed too many",
        )

    def claim_group(self, groups: Sequence[Sequence[int]]) -> Claim:
        """Claim the first of the groups of CPUs that nobody has claimed any core of. Raises `UnclaimedError`."""
        return self._claim(
            lambda free: next(filter(None, (_those(group, free) for group in groups)), None),
            "other processes have claimed cores of every group",
        )

    def _claim(self, choice: Choice, reason: str) -> Claim:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not all(is_private(folder) for folder in (self._folder, self._folder.parent)):
                raise UnclaimedError(f"{self._folder} belongs to or can be written by others")
            with locked(self._folder / "lock", LOCK_TIMEOUT):
                return self._choose(choice, reason)
        except OSError as error:
            raise UnclaimedError(f"claims cannot be kept in {self._folder}: {error}") from error

    def _choose(self, choice: Choice, reason: str) -> Claim:
        with ExitStack() as seen:
            free = [core for core in self.cores if self._hold(core, seen)]
            chosen = choice(free)
        if chosen is None:
            raise UnclaimedError(reason)
        with ExitStack() as locks:
            held = [self._hold(core, locks) for core in chosen]
            if not all(held):  # nobody else claims meanwhile, but a folder may be used by other programs
                raise UnclaimedError(reason)
            return Claim(chosen, locks.pop_all())

    def _hold(self, core: Core, locks: ExitStack) -> bool:
        """Lock the file of a core until `locks` is closed; return whether nobody else had."""
        with ExitStack() as own:
            file = own.enter_context((self._folder / str(core.number)).open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            locks.enter_context(own.pop_all())
            return True


def _those(group: Sequence[int], free: Sequence[Core]) -> list[Core] | None:
    """Return the cores of all CPUs of a group, with these alone; None where one is not free."""
    found = [Core(core.number, cpus, core.node) for core in free if (cpus := _within(core, group))]
    return found if sum(len(core.cpus) for core in found) == len(group) else None


def _within(core: Core, group: Sequence[int]) -> tuple[int, ...]:
    return tuple(cpu for cpu in core.cpus if cpu in group)
