"""Which GPU a thread works on, for what asks neither tensor nor caller: Triton's launches, events, pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

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
