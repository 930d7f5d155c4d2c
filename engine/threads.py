"""The threads that a rank computes with on a CPU: how many there are, and which cores they run on."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import ClassVar, Self

import torch

from engine.config import NOBIND, EngineConfig
from engine.device.core_claims import Claim, CoreRegistry, UnclaimedError
from engine.device.machine import cores, shares_cpus
from engine.device.topology import allowed_cpus, format_cpus
from engine.kernels.compiler import load_library

logger = logging.getLogger(__name__)


class _Binding(threading.local):
    """What a thread is bound to, None where it is not, and which CPUs it might run on before."""

    cpus: frozenset[int] | None = None
    before: frozenset[int] = frozenset()


_here = _Binding()


def unbound_cpus() -> frozenset[int]:
    """Return the CPUs that this thread may run on but for a binding of ours; empty where the system does not tell."""
    return allowed_cpus() if _here.cpus is None else _here.before


@dataclass(eq=False, slots=True)
class _Taken:
    """What a share has taken. count: threads. listed: whether a list of CPUs says so. claim: of cores, if any."""

    count: int
    listed: bool
    claim: Claim | None = None


class ThreadShare:
    """The threads that torch computes with on this process's CPU, which are set for the whole process.

    Taken when made: an even share of the cores for each of the `size` ranks of a group on this machine, never more
    than there were. Of several at once the smallest holds, in whatever order they are given back. One that nobody
    refers to any more is given back, too. OMP_NUM_THREADS says otherwise where it is set.

    config: of the rank, resolved. With its `cpu_omp_threads_bind` the share is of physical cores, and they are
    claimed for this rank; a list says how many threads there are. Where none can be claimed, the log says so, and
    threads run where the kernel puts them. Only threads that compute are bound: the one that calls `bind_thread`, and
    its team.
    """

    # What torch keeps for the whole process can only be shared out for the whole process.
    _lock: ClassVar[RLock] = RLock()  # who holds it may be the one whom the collection of another share interrupts
    _taken: ClassVar[list[_Taken]] = []
    _before: ClassVar[int] = 0  # the first was taken, or as somebody else chose later
    _set: ClassVar[int] = 0  # by the last that was taken or given back

    def __init__(self, size: int, config: EngineConfig | None = None, registry: CoreRegistry | None = None) -> None:
        binds = config is not None and config.cpu_omp_threads_bind != NOBIND
        found = (registry or CoreRegistry(unbound_cpus())) if binds else None
        groups = config.cpu_groups if config is not None else ()
        self._own = _Taken(len(groups[0]) if groups else _share(size, found), bool(groups))
        self._take(self._own)
        self._return = weakref.finalize(self, ThreadShare._give_back, self._own)
        self._return.atexit = False  # a process that ends gives back everything
        if found is not None:
            self._own.claim = _claimed(found, groups)

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs that were claimed for this rank, none where it is not bound."""
        return frozenset() if self._own.claim is None else self._own.claim.cpus

    def bind_thread(self) -> None:
        """Let the calling thread compute with a team of this rank's size, on its CPUs alone where it has claimed any.

        Threads that it starts later run there as well. Costs nothing where it is so already.
        """
        # Each thread has a number of its own in OpenMP, at first that of the environment as OpenMP was loaded: torch
        # hands it the process's when it is asked for that.
        torch.get_num_threads()
        claim = self._own.claim
        if claim is not None and _here.cpus is not claim.cpus:
            _here.before = unbound_cpus()
            _here.cpus = claim.cpus
            _bind(claim.cpus)

    def unbind_thread(self) -> None:
        """Undo `bind_thread` in the calling thread."""
        _unbind(self._own.claim)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Bind the calling thread while entered: memory lies at the node of the thread that writes to it first."""
        self.bind_thread()
        try:
            yield
        finally:
            self.unbind_thread()

    def give_back(self) -> None:
        """Leave the others what they share, after the last what was found. Can be called twice.

        The calling thread is no longer bound; other threads that were have ended by then.
        """
        self._return()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    @classmethod
    def _give_back(cls, own: _Taken) -> None:
        claim, own.claim = own.claim, None
        _unbind(claim)
        if claim is not None:
            claim.release()
        with cls._lock:
            if own in cls._taken:
                cls._taken.remove(own)
                cls._set_threads()

    @staticmethod
    def _take(own: _Taken) -> None:
        if "OMP_NUM_THREADS" in os.environ and not own.listed:
            return
        with ThreadShare._lock:
            found = torch.get_num_threads()
            if not ThreadShare._taken or found != ThreadShare._set:
                ThreadShare._before = ThreadShare._set = found
            ThreadShare._taken.append(own)
            ThreadShare._set_threads()

    @staticmethod
    def _set_threads() -> None:
        """Set what all that are taken allow, unless somebody else has chosen meanwhile."""
        counts = [own.count for own in ThreadShare._taken]
        if not any(own.listed for own in ThreadShare._taken):
            counts.append(ThreadShare._before)
        wanted = min(counts)
        if torch.get_num_threads() == ThreadShare._set != wanted:
            torch.set_num_threads(wanted)
            ThreadShare._set = wanted


def _share(size: int, registry: CoreRegistry | None) -> int:
    """Return how many threads one of `size` ranks computes with: one a core, a physical one where it is bound."""
    found = cores() if registry is None else min(cores(), len(registry.cores))
    return max(1, found // size)


def _claimed(registry: CoreRegistry, groups: tuple[tuple[int, ...], ...]) -> Claim | None:
    """Return the cores of this rank, None where it has none; the log says which, or why not."""
    try:
        if not registry.cores:
            raise UnclaimedError("this system binds no threads")
        if not groups and shares_cpus():
            raise UnclaimedError("the container's quota is less than its cores, which it shares with others")
        claim = registry.claim_group(groups) if groups else registry.claim(torch.get_num_threads())
    except UnclaimedError as error:
        logger.warning("threads are not bound to cores: %s", error)
        return None
    logger.info("threads are bound to %s", claim)
    return claim


def _unbind(claim: Claim | None) -> None:
    """Let the calling thread run where it might before it was bound to these cores, if it is."""
    if claim is not None and _here.cpus is claim.cpus:
        _here.cpus = None
        _bind(_here.before)


def _bind(cpus: frozenset[int]) -> None:
    """Bind the calling thread and, where a C compiler is there, the threads of its team that it has already."""
    os.sched_setaffinity(0, cpus)
    count = torch.get_num_threads()
    library = load_library(("bind.c",), {}) if count > 1 else None
    if library is not None:
        numbers = (ctypes.c_int * len(cpus))(*cpus)
        refused = library.bind_team(numbers, len(cpus), count)
        if refused:
            logger.warning("some of %d threads could not be bound to CPUs %s", count, format_cpus(cpus))
