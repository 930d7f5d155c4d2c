"""CUDA in shapes alone, on a machine without a GPU: what the engine queues for a device is checked, not computed.

Tensors are torch's fake ones: they have a device, a shape and a dtype, and no contents. An operation that mixes
devices, or whose result the host would have to wait for (`item`, `nonzero`, a mask as an index), raises. Streams,
events, graphs and figures of memory are stand-ins; Triton's kernels are looked up and not run.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from parallel.parameter import ShardedParameter

# Without it torch refuses to so much as index a tensor that says it is on CUDA.
GUARD = """
#include <c10/core/impl/FakeGuardImpl.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>);
"""
MEMORY = 80 << 30  # bytes of the GPU that is not there
NOTHING_ALLOCATED = {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}


@lru_cache
def why_no_shapes() -> str | None:
    """Return why CUDA cannot be played here, None when it can."""
    if torch.cuda.is_available():
        return "there is a GPU here: tests/gpu shows more"
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return "no C++ compiler here to make torch's guard for a device that is not there"
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        command = [
            compiler,
            "-shared",
            "-fPIC",
            "-std=c++20",
            f"-I{root / 'include'}",
            str(source),
            "-o",
            str(library),
        ]
        libraries = [f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        made = subprocess.run([*command, *libraries], capture_output=True, text=True)
        if made.returncode:
            return f"torch's guard for a device that is not there does not compile: {made.stderr[:300]}"
        ctypes.CDLL(str(library))
    return None


class FakeStream:
    """A stream on which everything has run already."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device("cuda:0")
        self.cuda_stream = 0

    def wait_stream(self, other: FakeStream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: FakeEvent) -> None:
        """Nothing to wait for."""

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Return an event that is over."""
        return event or FakeEvent()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Return that everything has run."""
        return True


class FakeEvent:
    """An event that is over."""

    def __init__(self, **_: Any) -> None:
        self.recorded = 0

    def record(self, stream: FakeStream | None = None) -> None:
        """Count it."""
        self.recorded += 1

    def synchronize(self) -> None:
        """It is over."""

    def wait(self, stream: FakeStream | None = None) -> None:
        """It is over."""

    def query(self) -> bool:
        """It is over."""
        return True


class FakeGraph:
    """A graph of which only the recording ran."""

    def capture_begin(self, **_: Any) -> None:
        """Record."""

    def capture_end(self) -> None:
        """Record no more."""

    def replay(self) -> None:
        """Leave everything as it is."""


@dataclass
class Played:
    """What was asked of the GPU that is not there.

    kernels: names of Triton's kernels, in order of their launches. compiled: what each would be compiled for.
    device: number of the current GPU. waits: copies to it that the host waited for, and so for all that was queued.
    """

    shapes: FakeTensorMode
    kernels: list[str] = field(default_factory=list)
    compiled: set[tuple[Any, ...]] = field(default_factory=set)
    device: int = 0
    waits: int = 0

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Let another GPU be the current one."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before


class FakeParameter(FakeTensor, ShardedParameter):
    """A sharded parameter without contents; torch would make a bare fake tensor of one."""

    @staticmethod
    def of(cls: type, data: Tensor, axis: int | None = None, pieces: Any = ()) -> Tensor:
        """Take the place of `ShardedParameter.__new__`."""
        made: Any = data.detach()
        made.__class__ = FakeParameter
        made._is_param = True
        made.axis, made.pieces, made.loaded_parts, made.vacant = axis, tuple(pieces), set(), False
        return made


class _Creation(TorchFunctionMode):
    """Host memory is not pinned where no driver could do it, and what is copied from the host has no contents."""

    def __init__(self, played: Played) -> None:
        super().__init__()
        self._played = played
        self._shapes = played.shapes

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).new_empty(np.shape(args[0]), device=device)
        if func is Tensor.to and args[0].device.type == "cpu" and not kwargs.get("non_blocking"):
            self._played.waits += any("cuda" in str(each) for each in (*args[1:], *kwargs.values()))
        if func is Tensor.to and not isinstance(args[0], FakeTensor):
            args = (self._shapes.from_tensor(args[0]), *args[1:])
        if func is Tensor.numpy:
            return _zeros(args[0])
        if func in (torch.Tensor.pin_memory, torch.Tensor.is_pinned):
            return args[0] if func is torch.Tensor.pin_memory else True
        return func(*args, **kwargs)


@contextmanager
def cuda_in_shapes() -> Iterator[Played]:
    """Let torch believe in one GPU; tensors that are made inside have no contents."""
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: played.device,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a GPU that is not there",
        "get_device_properties": lambda device=None: mock.Mock(
            multi_processor_count=132, total_memory=MEMORY, major=9, minor=0, L2_cache_size=50 << 20
        ),
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_stats": lambda device=None: dict(NOTHING_ALLOCATED),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: FakeStream(),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: played.on(torch.device(device).index or 0),
        "graph_pool_handle": lambda: (0, 0),
        "CUDAGraph": FakeGraph,
        "Stream": FakeStream,
        "Event": FakeEvent,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(ShardedParameter, "__new__", FakeParameter.of))
        # What is read from files would need contents.
        stack.enter_context(mock.patch("engine.loader.parameters.fill", lambda reads, device, ranks, told: 0))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", _record_stream))
        played = Played(stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True)))
        stack.enter_context(_Creation(played))
        real = torch.from_numpy
        stack.enter_context(
            mock.patch.object(torch, "from_numpy", lambda array: played.shapes.from_tensor(real(array)))
        )
        if importlib.util.find_spec("triton"):
            stack.enter_context(_kernels_noted(played))
        yield played


def _zeros(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return what the host reads of a tensor, or writes to pinned memory: nothing, of its shape."""
    if tensor.device.type != "cpu":
        raise RuntimeError(f"the host reads a tensor that is on {tensor.device}")
    return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _record_stream(tensor: Tensor, stream: FakeStream) -> None:
    if tensor.device.type != "cuda":
        raise RuntimeError(f"record_stream of a tensor on {tensor.device}")


@contextmanager
def _kernels_noted(played: Played) -> Iterator[None]:
    """Note the launches of Triton's kernels in place of running them."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, **constants: Any) -> None:
        for each in args:
            if isinstance(each, Tensor) and each.device != torch.device("cuda", played.device):
                raise RuntimeError(
                    f"kernel {kernel.fn.__name__} on {played.device} is given a tensor on {each.device}"
                )
        played.kernels.append(kernel.fn.__name__)
        played.compiled.add(_compiled_for(kernel, args, constants))

    with mock.patch.object(InterpretedFunction, "run", run), mock.patch.object(JITFunction, "run", run):
        yield


def _compiled_for(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return what Triton would compile the kernel for: where that differs, a launch waits for another kernel."""
    numbers, addresses = (
        kernel.kwargs.get(what) or () for what in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    kinds = []
    for name, value in zip(kernel.arg_names, args, strict=False):
        if isinstance(value, Tensor):
            aligned = name not in addresses and value.storage_offset() * value.itemsize % 16 == 0
            kinds.append((value.dtype, aligned))
        elif isinstance(value, int) and name not in numbers:
            kinds.append((value == 1, value % 16 == 0))
        else:
            kinds.append(None if value is None else type(value))
    settled = sorted((name, value) for name, value in constants.items() if name not in ("grid", "warmup"))
    return (kernel.fn.__name__, *kinds, *settled)
