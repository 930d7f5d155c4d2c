"""Helpers for asyncio tasks: whether the running task was cancelled, and one error of an exception group."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether the running task itself was cancelled, and not only what it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group, which may hold groups: one stands for all."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
