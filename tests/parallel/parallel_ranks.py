"""Real ranks for tests: rank 0 is the test's own process, the others are launched and run what the test names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from parallel import host_group
from parallel.errors import ChannelClosed, ChannelError
from parallel.group import Group, SoloGroup
from parallel.launcher import LocalWorkerGroup, launch
from parallel.message_ring import SharedMemoryRing
from parallel.rendezvous import Rendezvous, RendezvousAddress
from parallel.torch_group import TorchGroup, connect
from parallel.torch_store import TorchStore

TIMEOUT = 60.0  # seconds, for machines that are busy with other tests


class FakeGroup(SoloGroup):
    """A rank without peers, for what needs no collective."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("cpu")
        self.rank, self.size = rank, size


@dataclass
class Crew:
    """A group whose ranks all run the same checks."""

    group: Group
    gang: LocalWorkerGroup
    ring: SharedMemoryRing

    def run(self, check: Callable[[Group], None]) -> None:
        """Run `check`, a function of an importable module, on every rank; fail with what any rank fails with."""
        self.ring.send(f"{check.__module__}:{check.__name__}".encode(), TIMEOUT)
        try:
            check(self.group)
            self.group.barrier()
        except ChannelError as error:
            raise AssertionError(self.gang.wait_for_death(TIMEOUT)) from error


@contextmanager
def crew(size: int, over: str = "memory") -> Iterator[Crew]:
    """Ranks of one host that talk over its "memory", over "sockets", or over a process group of "torch".

    Over "python" they talk over memory as without a C compiler, over "mixed" every other rank does.
    """
    with (
        SharedMemoryRing.create(size - 1) as ring,
        Rendezvous.create() as rendezvous,
        launch(size, _serve, (size, rendezvous.address, ring.name, over)) as gang,
        _join(over, 0, size, rendezvous) as group,
    ):
        yield Crew(group, gang, ring)
        ring.close()
        assert gang.join(TIMEOUT)


def _serve(rank: int, size: int, address: RendezvousAddress, ring_name: str, over: str) -> None:
    torch.set_num_threads(1)
    ring = SharedMemoryRing.attach(ring_name, rank - 1)
    with ring, _join(over, rank, size, address) as group:
        while True:
            try:
                module, name = bytes(ring.receive()).decode().split(":")
            except ChannelClosed:
                return
            getattr(importlib.import_module(module), name)(group)
            group.barrier()


def _join(over: str, rank: int, size: int, where: Rendezvous | RendezvousAddress) -> Group:
    if over != "torch":
        in_python = over == "python" or (over == "mixed" and rank % 2)
        with patch.object(host_group, "exchange_library", lambda: None) if in_python else nullcontext():
            return connect(rank, size, where, "cpu", TIMEOUT, shared_memory=over != "sockets")
    rendezvous = Rendezvous.join(where, TIMEOUT) if isinstance(where, RendezvousAddress) else where
    store = TorchStore(rendezvous, "test", rank, size, TIMEOUT)
    gloo = dist.ProcessGroupGloo(store.view("gloo"), rank, size, timedelta(seconds=TIMEOUT))
    return TorchGroup(gloo, rank, size, torch.device("cpu"), TIMEOUT, store)
