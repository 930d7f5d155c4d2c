"""How torch and Python say that memory ran out, whoever asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import StepMemoryError

CPU_ALLOCATOR = "DefaultCPUAllocator"  # named by torch when the system gives it no memory


@contextmanager
def out_of_memory_told(what: str = "the step") -> Iterator[None]:
    """Turn what torch and Python raise when memory runs out into `StepMemoryError`. what: that wanted it."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise StepMemoryError(f"no memory for {what}: {error}") from error
    except RuntimeError as error:
        if CPU_ALLOCATOR not in str(error):  # torch has no type of its own for it
            raise
        raise StepMemoryError(f"no memory for {what}: {error}") from error
