"""A thread's device: choosing it, copies without waiting, running out of its memory, whether Triton runs on it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import StepMemoryError
from parallel.group import Group

P = ParamSpec("P")
R = TypeVar("R")


class Member(Protocol):
    """Who belongs to a group, and so to a device."""

    group: Group


M = TypeVar("M", bound=Member)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's own meanwhile; a new thread has the first one, whichever its maker had."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_own_device(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Let a method run with the device of its object's group as the current one."""

    @wraps(method)
    def run(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with current(self.group.device):
            return method(self, *args, **kwargs)

    return run


ALIGNMENT = 16  # bytes: any dtype can be viewed there, and kernels load whole vectors


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on `device`; on CPU they share the arrays' memory.

    On CUDA they share one buffer, copied from pinned memory behind what is queued on the current stream. The arrays
    may be written to again at once.
    """
    if device.type != "cuda":
        return [torch.from_numpy(each) for each in arrays]
    packed = pack(arrays, torch.empty(packed_size(arrays), dtype=torch.uint8, pin_memory=True))
    return unpack(packed.to(device, non_blocking=True), arrays)


def upload_column(values: NDArray[Any], like: Tensor) -> Tensor:
    """Return `values`, [num_rows], as [num_rows, 1] on the device of `like`."""
    return upload([values], like.device)[0][:, None]


def packed_size(arrays: Sequence[NDArray[Any]]) -> int:
    """Return the bytes that `arrays` take in a buffer."""
    return sum(map(_room, arrays))


def pack(arrays: Sequence[NDArray[Any]], buffer: Tensor) -> Tensor:
    """Write the arrays one after another into `buffer`, [packed_size] bytes on the host, and return it."""
    flat, start = buffer.numpy(), 0
    for each in arrays:
        flat[start : start + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
        start += _room(each)
    return buffer


def unpack(buffer: Tensor, like: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return the tensors that lie in `buffer` as `pack` wrote arrays of these shapes and dtypes."""
    found, start = [], 0
    for each in like:
        dtype = torch.from_numpy(np.empty(0, each.dtype)).dtype
        found.append(buffer[start : start + each.nbytes].view(dtype).view(each.shape))
        start += _room(each)
    return found


def _room(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


class Copy(Protocol):
    """A copy that may still be under way."""

    def synchronize(self) -> None:
        """Wait until it is done and its source may be written again."""


class HostCopies(Protocol):
    """How a device is reached from the host."""

    def pinned(self, count: int) -> Tensor:
        """Return memory of the host that the device can read by itself, [count] int32."""

    def send(self, source: Tensor, target: Tensor) -> Copy:
        """Start to copy `source`, which is pinned, to the device, after all that was asked of it before."""


class CudaCopies:
    """Copies on the current stream."""

    def pinned(self, count: int) -> Tensor:
        """See `HostCopies`."""
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def send(self, source: Tensor, target: Tensor) -> Copy:
        """See `HostCopies`."""
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(target.device))
        return done


class HostPair:
    """Two pinned buffers in turn: one is filled while the other's copy may be under way."""

    def __init__(self, copies: HostCopies, count: int) -> None:
        """count: int32 that each holds."""
        self._copies = copies
        self._buffers = [copies.pinned(count) for _ in range(2)]
        self._under_way: list[Copy | None] = [None, None]
        self._turn = 0

    def next(self) -> Tensor:
        """Return the buffer to fill now, [count]; waits until what was sent from it last has arrived."""
        self._turn = 1 - self._turn
        copy = self._under_way[self._turn]
        if copy is not None:
            copy.synchronize()
            self._under_way[self._turn] = None
        return self._buffers[self._turn]

    def send(self, target: Tensor) -> None:
        """Start to copy as much as `target` holds from the head of the buffer that `next` returned."""
        source = self._buffers[self._turn][: len(target)]
        self._under_way[self._turn] = self._copies.send(source, target)


CPU_ALLOCATOR = "DefaultCPUAllocator"  # named by torch when the system gives it no memory


@contextmanager
def as_step_memory_error(what: str = "the step") -> Iterator[None]:
    """Turn what torch and Python raise when memory runs out into `StepMemoryError`. what: that wanted it."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise StepMemoryError(f"no memory for {what}: {error}") from error
    except RuntimeError as error:
        if CPU_ALLOCATOR not in str(error):  # torch has no type of its own for it
            raise
        raise StepMemoryError(f"no memory for {what}: {error}") from error


LEAST_CAPABILITY = (8, 0)
COMPILERS = ("gcc", "clang")  # that Triton looks for


def why_no_triton(device: torch.device) -> str | None:
    """Return what a CUDA device or the installation lacks, None when nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        return lacks(LEAST_CAPABILITY, found)
    # Triton compiles a small C program to launch each kernel by, on the machine that it runs on.
    if "CC" not in os.environ and not any(map(shutil.which, COMPILERS)):
        return "Triton needs a C compiler to launch kernels, and there is none; install gcc"
    if not _found_elsewhere() and not python_header().exists():
        return (
            f"Triton needs Python's headers to launch kernels, and there is no {python_header()}; install python3-dev"
        )
    return None


def python_header() -> Path:
    """Return where Triton looks for what that program includes."""
    scheme = sysconfig.get_default_scheme()
    # Debian's name for what pip installs; headers come with the system's Python.
    plain = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_path("include", plain), "Python.h")


def _found_elsewhere() -> bool:
    """Whether the compiler's settings have it look elsewhere, too."""
    return "CPATH" in os.environ or "C_INCLUDE_PATH" in os.environ


def lacks(least: tuple[int, int], found: tuple[int, int], what: str = "it") -> str:
    """Return that `what` needs a GPU of a higher compute capability."""
    return f"{what} needs compute capability {least[0]}.{least[1]}, this GPU has {found[0]}.{found[1]}"
