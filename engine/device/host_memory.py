"""How the C library takes memory for tensors, and gives it back: glibc's settings, nothing where there is another."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.device.machine import collect_garbage

# Of `mallopt`, see malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
WEIGHTS = 256 << 10  # bytes from which on an allocation is a mapping of its own while weights are loaded
# What glibc's thresholds grow to by themselves in a process that has freed large tensors.
USUAL_MMAP, USUAL_TRIM = 32 << 20, 64 << 20
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")  # of who knows better

_loading: list[None] = []  # one for each model that is being loaded


@contextmanager
def weights_apart() -> Iterator[None]:
    """Let each weight that is loaded be a mapping of its own, which goes back to the system when it is freed.

    Weights are read, quantised and packed one after another. In the C library's heap what is freed on the way leaves
    gaps: a model of 0.2B parameters held 477 MB where 313 were used (`python -m tests.bench.loading_memory`).
    Afterwards tensors of steps come from the heap again, which takes no page faults each time. What the environment
    says of malloc stays as it is.
    """
    _loading.append(None)
    _for_weights()
    try:
        yield
    finally:
        _loading.pop()
        if not _loading:
            _for_steps()


@contextmanager
def as_in_steps() -> Iterator[None]:
    """Take memory as steps do, inside of `weights_apart` too: for what is timed there."""
    if not _loading:
        yield
        return
    _for_steps()
    try:
        yield
    finally:
        _for_weights()


def give_back(device: torch.device) -> None:
    """Let the system have what was freed: torch and the C library would keep it for themselves."""
    collect_garbage()  # a model that was let go of may be part of a cycle
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _for_weights() -> None:
    _set({MMAP_THRESHOLD: WEIGHTS})


def _for_steps() -> None:
    _set({MMAP_THRESHOLD: USUAL_MMAP, TRIM_THRESHOLD: USUAL_TRIM})


def _set(values: dict[int, int]) -> None:
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None or any(os.environ.get(name) for name in SETTINGS):
        return
    for parameter, value in values.items():
        change(parameter, value)
