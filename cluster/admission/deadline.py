"""How long a client is willing to wait.

A deadline is a moment on the event loop's clock, which never jumps; between processes only the remaining seconds
travel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster.errors import ApiError
from engine.scheduler.scheduler import DEADLINE_EXCEEDED

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


def deadline_exceeded(message: str = "the request's deadline passed before it was complete") -> ApiError:
    """Return the error of a request that ran out of the time that its client gave it."""
    return ApiError(DEADLINE_EXCEEDED, message)
