"""Launches Triton kernels by handles that are kept, past Triton's own dispatch, which takes the host tens of µs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

Grid = tuple[int, ...]
INT32, INT64 = 1 << 31, 1 << 63


class _Handle(NamedTuple):
    """What Triton's dispatch found, with the arguments that do not change: see `JITFunction.run`."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class Kept:
    """A kernel, launched as `kernel[grid](*args, **constants)`: arguments by their places, constants after them.

    The first launch for arguments of a kind is Triton's own. What it compiled or found is kept under all that it
    looked at to choose it, so that later ones of that kind are the same: dtypes, what divides by 16, which integers
    are 1 or need 64 bits, and the constants. In Triton's interpreter every launch is its own.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.__doc__, self.__name__ = kernel.__doc__, kernel.__name__
        self._handles: dict[tuple[Any, ...], _Handle] = {}
        self._told = tuple((param.do_not_specialize, param.do_not_specialize_on_alignment) for param in kernel.params)

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, /, *args: Any, **constants: Any) -> None:
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        kind = (device, *self._kinds(args), *constants, *constants.values())
        handle = self._handles.get(kind)
        if handle is None or _watched():
            self._launch_first(grid, args, constants, kind)
            return
        across, down, deep = (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(device)
        handle.run(
            across, down, deep, stream, handle.function, handle.metadata, None, None, None, *args, *handle.constants
        )

    def _launch_first(
        self, grid: Grid, args: tuple[Any, ...], constants: dict[str, Any], kind: tuple[Any, ...]
    ) -> None:
        made = self.kernel[grid](*args, **constants)
        # Other makers' GPUs are compiled for by more than that.
        if made is not None and triton.runtime.driver.active.get_current_target().backend == "cuda":
            rest = tuple(constants[name] for name in self.kernel.arg_names[len(args) :])
            self._handles[kind] = _Handle(made.run, made.function, made.packed_metadata, rest)

    def _kinds(self, args: tuple[Any, ...]) -> list[Any]:
        """Return what Triton compiles for: something of each argument, none like another kind's, and who is odd."""
        kinds: list[Any] = []
        odd, bit = 0, 1
        for value, (any_value, any_place) in zip(args, self._told, strict=False):
            if isinstance(value, Tensor):
                kinds.append(value.dtype)
                if not any_place and value.data_ptr() & 15:
                    odd |= bit
            elif type(value) is int:
                what = "number" if any_value else "one" if value == 1 else "odd number" if value & 15 else "multiple"
                kinds.append(what if -INT32 <= value < INT32 else (what, value < INT64))
            else:
                kinds.append(value if value is None else (type(value), value if type(value) is bool else None))
            bit <<= 1
        kinds.append(odd)
        return kinds


def kept(kernel: Any) -> Any:
    """Return a kernel that is launched by handles; one of the interpreter as it is."""
    return Kept(kernel) if isinstance(kernel, JITFunction) else kernel


def ceil_div(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`; `triton.cdiv` takes 3 µs for that."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the least power of two that is at least `count`, which is not 0; as quick as `ceil_div`."""
    return 1 << (count - 1).bit_length()


def _watched() -> bool:
    """Whether a hook, of a profiler say, is to hear of launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)
