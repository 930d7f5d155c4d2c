"""All-reduce of small messages between the GPUs of one host by a single kernel over symmetric memory.

Each rank copies its message into a buffer that all ranks have mapped, waits for the others, and sums all buffers in
rank order: one launch, one trip, the same bits on every rank, where NCCL takes several hops. Every rank reads every
message, so this is for small ones; larger ones go through the group below, NCCL's.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch
from torch import Tensor

# Documented as public, yet torch re-exports it in a way that type checkers take for private.
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from typing_extensions import override

from parallel.group import Group, require_contiguous

logger = logging.getLogger(__name__)

# Largest messages, in bytes by ranks, up to which vLLM's custom all-reduce takes one shot rather than two.
LIMITS = {2: 1 << 20, 3: 512 << 10, 4: 512 << 10, 5: 256 << 10, 6: 256 << 10, 7: 256 << 10, 8: 256 << 10}
ALIGNMENT = 16  # bytes that the kernel loads at a time
DTYPES = (torch.bfloat16, torch.float32)  # that the kernel is written for
# Torch counts its meetings by process, and ranks whose counts differ, as after an earlier group of one of them, would
# wait for each other as long as the store lets them.
MEETING = timedelta(seconds=20)
REST_TIMEOUT = 2.0  # seconds that a GPU has to end its work before its buffer is left behind
_FINE = "fine"
_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class OneShot(Protocol):
    """This rank's end of a buffer that all ranks have mapped."""

    def allocate(self, size: int) -> None:
        """Make the buffer of `size` bytes. Raises `RuntimeError` where it cannot be."""

    def meet(self) -> None:
        """Map the other ranks' buffers: all ranks at once. Raises `RuntimeError` where they cannot be."""

    def all_reduce(self, x: Tensor) -> None:
        """Sum the ranks' `x` in place, in rank order: all ranks at once, queued on the current stream."""

    def close(self) -> None:
        """Let go of the buffers."""


class SymmetricGroup(Group):
    """A group whose small sums go through `one_shot`; everything else goes through `inner`. Owns both.

    limit: bytes of the largest message that goes in one shot. fixed_order: larger ones go in pieces of that size
    instead of through `inner`, so that a sum has the same bits whatever it is sent with.

    A shot waits on the device for its peers without a deadline. Logits or draws are gathered by `inner` at the end of
    every step that draws, whose deadline then ends the wait.
    """

    def __init__(self, inner: Group, one_shot: OneShot, limit: int, fixed_order: bool) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self.sums_in_order = fixed_order or inner.sums_in_order
        self._inner = inner
        self._one_shot = one_shot
        self._limit = limit
        self._fixed_order = fixed_order

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.nbytes:
            return x
        fits = x.dtype in DTYPES and x.nbytes % ALIGNMENT == 0
        if not self._fixed_order and (x.nbytes > self._limit or not fits):
            return self._inner.all_reduce(x)
        if not fits:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"{x.nbytes} bytes of {x.dtype}: only whole {ALIGNMENT} bytes of {kinds} sum in order")
        require_contiguous(x)
        for piece in x.view(-1).split(self._limit // x.element_size()):
            self._one_shot.all_reduce(piece)
        return x

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self._inner.all_gather(x, dim)

    @override
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        return self._inner.broadcast(x, src, timeout)

    @override
    def transfer(self, x: Tensor, src: int, dst: int) -> Tensor:
        return self._inner.transfer(x, src, dst)

    @override
    def all_to_all(
        self, x: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        return self._inner.all_to_all(x, sent, received)

    @override
    def barrier(self) -> None:
        self._inner.barrier()

    @override
    def close(self) -> None:
        self._inner.close()  # first, as it ends what the device would wait for behind a shot
        self._one_shot.close()


def through_symmetric_memory(
    group: Group,
    store: Store,
    fixed_order: bool = False,
    make: Callable[[Group, Store], OneShot] | None = None,
    here: Callable[[torch.device], str] | None = None,
) -> Group:
    """Return `group` with its small sums in one shot, or as it is when one of the ranks cannot: all ranks alike.

    store: where the ranks agree, for this alone. make, here: stand-ins for torch's kernels and `where` in tests.
    """
    agreed = _Agreement(group, store)
    reason = agreed.first(_why_not(group, make is None)) or agreed.one_host((here or where)(group.device))
    one_shot = None
    if reason is None:
        one_shot = (make or _TorchOneShot)(group, store)
        limit = LIMITS[group.size]
        trials = [partial(_try_out, group, one_shot, dtype) for dtype in DTYPES]
        stages: list[Callable[[], None]] = [partial(one_shot.allocate, limit), one_shot.meet, *trials]
        for act in stages:
            reason = agreed.first(_failure(act))
            if reason is not None:
                break
    if one_shot is None or reason is not None:
        logger.info("all-reduce: nccl; symmetric memory cannot be used: %s", reason)
        if one_shot is not None:
            one_shot.close()
        return group
    logger.info(
        "all-reduce: one shot over symmetric memory up to %d KiB, %s beyond",
        limit >> 10,
        "in several" if fixed_order else "nccl",
    )
    return SymmetricGroup(group, one_shot, limit, fixed_order)


class _Agreement:
    """What the ranks exchange over a store, a round at a time."""

    def __init__(self, group: Group, store: Store) -> None:
        self._group = group
        self._store = store
        self._rounds = 0

    def first(self, problem: str | None) -> str | None:
        """Return the first rank's problem of this round, None when none has any; the same on all ranks."""
        found = self._exchange(problem or _FINE)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text != _FINE), None)

    def one_host(self, place: str) -> str | None:
        """Return None where the ranks are on one host's different GPUs. place: this rank's, from `where`."""
        hosts, devices = zip(*(text.split(" ", 1) for text in self._exchange(place)), strict=True)
        if len(set(hosts)) > 1:
            return "the ranks are on several hosts"
        return "two ranks share a GPU" if len(set(devices)) < len(devices) else None

    def _exchange(self, text: str) -> list[str]:
        self._rounds += 1
        self._store.set(f"{self._rounds}/{self._group.rank}", text)
        return [self._store.get(f"{self._rounds}/{rank}").decode() for rank in range(self._group.size)]


def where(device: torch.device) -> str:
    """Return a word for this host, running since it last started, and one for its GPU."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text(encoding="ascii").strip() if boot.exists() else socket.gethostname()
    return f"{host} {torch.cuda.get_device_properties(device).uuid}"


def _why_not(group: Group, with_torch: bool) -> str | None:
    if group.size not in LIMITS:
        return f"{group.size} ranks are more than the {max(LIMITS)} that it pays for"
    if not with_torch:
        return None
    if torch.cuda.get_device_capability(group.device) < (8, 0):
        return "its kernels need a GPU of compute capability 8.0"
    return None if hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out") else "this torch has no such kernel"


def _failure(act: Callable[[], None]) -> str | None:
    """Return what `act` fails with, whatever it is: the other ranks must hear of it, or they would wait."""
    try:
        act()
    except Exception as error:
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return None


def _try_out(group: Group, one_shot: OneShot, dtype: torch.dtype) -> None:
    """Sum what is known beforehand."""
    x = torch.full((64,), group.rank + 1, dtype=dtype, device=group.device)
    one_shot.all_reduce(x)
    if not bool((x == group.size * (group.size + 1) // 2).all()):
        raise RuntimeError(f"a trial sum of {dtype} was wrong")


def _common_name(store: Store, rank: int) -> str:
    """Return a name that all ranks have for this group, and no process for two."""
    if rank == 0:
        store.set("name", f"squadron-{uuid4().hex}")
    return store.get("name").decode()


def _comes_to_rest(device: torch.device) -> bool:
    """Return whether a GPU is done with its work, or is soon. One that has failed is not."""
    deadline = time.monotonic() + REST_TIMEOUT
    try:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        while not done.query() and time.monotonic() < deadline:
            time.sleep(0.01)
        return done.query()
    except RuntimeError:
        return False


class _TorchOneShot:
    """Torch's own kernel (`torch.distributed._symmetric_memory`), for a group that torch's registry does not know.

    The kernel looks its group up by name, so one is registered that carries name, rank and size, nothing else; the
    buffers are exchanged over the store.
    """

    def __init__(self, group: Group, store: Store) -> None:
        self._device = group.device
        self._store = store
        self._info = (group.rank, group.size, PrefixStore("buffers", store))
        self._name = ""
        self._group: Any = None
        self._buffer: Tensor | None = None

    def allocate(self, size: int) -> None:
        c10d: Any = torch._C._distributed_c10d
        rank, ranks, store = self._info
        self._name = _common_name(self._store, rank)
        self._group = c10d.ProcessGroup(store, rank, ranks)
        self._group._set_group_name(self._name)
        c10d._register_process_group(self._name, self._group)
        c10d._SymmetricMemory.set_group_info(self._name, rank, ranks, store)
        self._buffer = c10d._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self._device)

    def meet(self) -> None:
        # Ray shows each rank its own GPU only, as number 0 everywhere, and torch takes equal numbers for one GPU. The
        # ranks have agreed before that theirs differ.
        os.environ.setdefault(_OVERLAP, "1")
        c10d: Any = torch._C._distributed_c10d
        store: Any = self._store
        usual = store.timeout
        store.set_timeout(MEETING)
        try:
            c10d._SymmetricMemory.rendezvous(self._buffer, self._name)
        finally:
            store.set_timeout(usual)

    def all_reduce(self, x: Tensor) -> None:
        buffer = self._buffer
        if buffer is None:
            raise RuntimeError("the buffer is gone")
        shared = buffer[: x.nbytes].view(x.dtype)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, x, "sum", self._name, x)

    def close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None and not _comes_to_rest(self._device):
            logger.warning("a GPU waits for a rank that is gone: a buffer of %d bytes is left to it", buffer.nbytes)
            # To free it, torch would wait for the GPU and let no other thread run meanwhile.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))
        if self._group is not None:
            c10d: Any = torch._C._distributed_c10d
            c10d._unregister_process_group(self._name)
            self._group = None
