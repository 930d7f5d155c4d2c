"""How long a client is willing to wait, and the timers that end what takes longer.

A deadline is a moment on the event loop's clock, which never jumps; between processes only the remaining seconds
travel.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from cluster.errors import ApiError
from engine.scheduler.scheduler import DEADLINE_EXCEEDED

T = TypeVar("T", bound=Hashable)

HEADER = "x-request-timeout-seconds"
LONGEST = 604_800  # seconds, a week: more is a slip of the pen
# Serve's proxy knows the header too, and cuts such a request off without our error. So ours comes first: by this
# share of the time, and at most by these seconds.
_EARLIER_SHARE, _EARLIER_MOST = 0.1, 0.5
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?|\.[0-9]{1,9}")


def timeout_of(values: Sequence[str]) -> float | None:
    """Return the seconds that the values of `HEADER` ask for, None without one.

    Raises `ApiError` (`invalid_value`, 400) naming the header.
    """
    if not values:
        return None
    text = values[0].strip()
    seconds = float(text) if _NUMBER.fullmatch(text) else 0.0
    if len(values) > 1 or not 0 < seconds <= LONGEST:
        given = f"not {text[:50]!r}" if len(values) == 1 else f"and sent once, not {len(values)} times"
        message = f"{HEADER} must be a number of seconds above 0 and at most {LONGEST}, such as 30 or 0.5, {given}"
        raise ApiError("invalid_value", message, param=HEADER, status=400)
    return seconds


def before_the_proxy(seconds: float) -> float:
    """Return in how many seconds a request behind Serve's proxy ends that may take `seconds`."""
    return seconds - min(seconds * _EARLIER_SHARE, _EARLIER_MOST)


def deadline_exceeded(
    message: str = "the request's deadline passed before it was complete", request_id: str | None = None
) -> ApiError:
    """Return the error of a request that ran out of the time that its client gave it."""
    return ApiError(DEADLINE_EXCEEDED, message, request_id=request_id)


class DeadlineTimers(Generic[T]):
    """One timer for each item that has a deadline; `expire` is called with it then. On one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[T], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._timers: dict[T, asyncio.TimerHandle] = {}

    def watch(self, item: T, deadline: float | None) -> None:
        """Follow an item. deadline: on the loop's clock, None = it has none."""
        if deadline is not None:
            self._timers[item] = self._loop.call_at(deadline, self._expire, item)

    def forget(self, item: T) -> None:
        """Follow an item no longer."""
        timer = self._timers.pop(item, None)
        if timer is not None:
            timer.cancel()
