"""Forms groups: over torch's NCCL between GPUs, over shared memory or our own sockets between CPU ranks.

Torch's process groups are made directly, never through its process-wide default group, so that several engines can
live in one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from parallel.errors import ChannelError, ChannelTimeout, ParallelError, RendezvousError
from parallel.group import Group, SoloGroup, require_contiguous
from parallel.host_group import StarGroup, through_shared_memory
from parallel.rendezvous import Rendezvous, RendezvousAddress
from parallel.symmetric import through_symmetric_memory
from parallel.torch_store import TorchStore

logger = logging.getLogger(__name__)

FOREVER = 10 * 365 * 86400.0  # seconds; torch has no word for no deadline
ABORT_TIMEOUT = 10.0  # seconds that a group's end waits for NCCL's


class TorchGroup(Group):
    """Ranks over one of torch's process groups, which it owns: NCCL's between GPUs.

    A collective is queued on the current stream: a dead or hung peer shows when the stream is next waited for, and
    NCCL's own watchdog ends this process once the deadline has passed. store: what the process group was made with,
    kept until its end.
    """

    def __init__(
        self,
        process_group: Any,
        rank: int,
        size: int,
        device: torch.device,
        limit: float = FOREVER,
        store: TorchStore | None = None,
    ) -> None:
        """limit: seconds that `process_group` gives each collective."""
        self.rank = rank
        self.size = size
        self.device = device
        self.sums_in_order = size == 2  # of two, there is one order; of more, size and moment choose it
        self._process_group = process_group
        self._store = store
        self._sum = dist.AllreduceOptions()
        self._limit = limit

    def limit(self, seconds: float) -> None:
        """Let every collective from now on take so many seconds."""
        self._limit = seconds
        if self._process_group is not None:
            self._process_group._set_default_timeout(timedelta(seconds=seconds))

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        require_contiguous(x)
        self._run("all-reduce", lambda pg: pg.allreduce([x], self._sum))
        return x

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        x = x.contiguous()
        joined = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._run("all-gather", lambda pg: pg._allgather_base(joined, x))
        return joined if dim in (0, -x.ndim) else torch.cat(joined.chunk(self.size), dim)

    @override
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        require_contiguous(x)
        options = dist.BroadcastOptions()
        options.rootRank = src
        if timeout is None:
            self._run("broadcast", lambda pg: pg.broadcast([x], options))
        else:
            self._broadcast_and_wait(x, options, min(timeout, FOREVER))
        return x

    def _broadcast_and_wait(self, x: Tensor, options: dist.BroadcastOptions, timeout: float) -> None:
        """Broadcast with a deadline of its own, which NCCL takes from the group when a collective is queued.

        It counts from then on: what is queued behind this one would be late with it, so the host waits.
        """
        usual = self._limit
        options.timeout = timedelta(seconds=timeout)
        self.limit(timeout)
        try:
            self._run("broadcast", lambda pg: pg.broadcast([x], options))
        finally:
            self.limit(usual)
        torch.cuda.current_stream(self.device).synchronize()

    @override
    def transfer(self, x: Tensor, src: int, dst: int) -> Tensor:
        require_contiguous(x)
        if self.rank == src != dst:
            self._run("send", lambda pg: pg.send([x], dst, 0))
        elif self.rank == dst != src:
            self._run("receive", lambda pg: pg.recv([x], src, 0))
        return x

    @override
    def all_to_all(
        self, x: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        x = x.contiguous()
        found = x.new_empty(x.shape[0] if received is None else sum(received), *x.shape[1:])
        ours, theirs = list(sent or ()), list(received or ())
        self._run("all-to-all", lambda pg: pg.alltoall_base(found, x, theirs, ours, dist.AllToAllOptions()))
        return found

    @override
    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @override
    def close(self) -> None:
        process_group, self._process_group = self._process_group, None
        if process_group is None:
            return
        _abort(process_group)
        if self._store is not None:
            self._store.close()

    def _run(self, name: str, start: Callable[[Any], Any]) -> None:
        if self._process_group is None:
            raise ChannelError(f"{name} on a group that is closed")
        try:
            start(self._process_group).wait()
        except RuntimeError as error:
            # torch has no type of its own for a missed deadline.
            late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            what = "missed its deadline" if late else "failed, a peer is gone"
            message = f"{name} of rank {self.rank} of {self.size} {what}: {error}"
            raise (ChannelTimeout if late else ChannelError)(message) from error


def _abort(process_group: Any) -> None:
    """End NCCL's kernels and free its communicators. Its shutdown would wait for peers, who may be gone.

    Graphs that captured collectives must be dropped before: NCCL waits for them as long as they live.
    """
    ending = Thread(target=process_group.abort, name="nccl-abort", daemon=True)
    ending.start()
    ending.join(ABORT_TIMEOUT)
    if ending.is_alive():
        logger.warning("NCCL did not let go of its communicators within %g s and is left behind", ABORT_TIMEOUT)


def connect(
    rank: int,
    size: int,
    rendezvous: Rendezvous | RendezvousAddress | None,
    device: torch.device | str,
    timeout: float,
    collective_timeout: float | None = None,
    name: str = "tensor-parallel",
    shared_memory: bool = True,
    fixed_order: bool = False,
) -> Group:
    """Form a group of `size` ranks and return this rank's end of it; blocks until all are there.

    rendezvous: rank 0 gives the one it created, the others its address; not needed for a group of one.
    device: what the collectives' tensors live on; "cuda:N" makes it NCCL, "cpu" shared memory or sockets.
    timeout / collective_timeout: seconds for forming the group / for each collective (as `timeout` where None).
    name: tells apart the groups that are formed over one rendezvous.
    shared_memory: whether CPU ranks that are all on one host send the hot collectives through memory, not sockets.
    fixed_order: whether large sums between GPUs, too, are taken in rank order where that is possible, at the cost of
    speed; `Group.sums_in_order` says what came of it.

    Raises `RendezvousError` when the ranks do not meet in time, `ValueError` for a rank outside the group.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be 0 to {size - 1} in a group of {size}, not {rank}")
    device = torch.device(device)
    if size == 1:
        return SoloGroup(device)
    if rendezvous is None:
        raise RendezvousError(f"a group of {size} needs the address of a rendezvous")
    if isinstance(rendezvous, RendezvousAddress):
        rendezvous = Rendezvous.join(rendezvous, timeout)
    limit = timeout if collective_timeout is None else collective_timeout
    try:
        if device.type == "cuda":
            return _on_gpus(rendezvous, name, rank, size, device, timeout, limit, fixed_order)
        return _on_cpus(rendezvous, name, rank, size, timeout, limit, shared_memory)
    except (RuntimeError, ParallelError) as error:
        raise RendezvousError(
            f"rank {rank} of {size} did not meet the others at {rendezvous.address} within {timeout:g} s: {error}"
        ) from error


def _on_gpus(
    rendezvous: Rendezvous,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    timeout: float,
    limit: float,
    fixed_order: bool,
) -> Group:
    """Form a group over NCCL. limit: seconds for each collective once it is formed."""
    store = TorchStore(rendezvous, name, rank, size, timeout)
    joined = TorchGroup(_nccl(store, rank, size, device, timeout), rank, size, device, timeout, store)
    joined.barrier()
    group = through_symmetric_memory(joined, store.view("symmetric"), fixed_order)
    joined.limit(limit)
    return group


def _on_cpus(
    rendezvous: Rendezvous, name: str, rank: int, size: int, timeout: float, limit: float, shared_memory: bool
) -> Group:
    """Form a group over sockets, or through memory where all ranks share a host."""
    joined = StarGroup(rendezvous.connections(name, rank, size, timeout), rank, size, timeout)
    joined.barrier()
    group: Group = joined
    if shared_memory:
        group = through_shared_memory(joined, rendezvous.store(f"{name}/segments", timeout), limit)
    joined.limit(limit)
    return group


def _nccl(store: TorchStore, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(store.view("nccl"), rank, size, options)
