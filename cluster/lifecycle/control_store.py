"""Ray's control store: a few bytes under a name, which outlive every process of ours and are read on every node.

`ray.experimental.internal_kv` is not public. This is the only file that uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from secrets import token_hex

import msgspec
from ray.exceptions import RayError
from ray.experimental import internal_kv

NAMESPACE = b"squadron"
FREE = b"free"  # what a claim holds that has ended
PAUSE = 0.5  # seconds between two looks at a claim that another process holds
# What Ray raises here: its own errors, and plain ones of its client of the control store; and what decoding raises.
FAILURES = (RayError, RuntimeError, OSError, AttributeError, AssertionError, msgspec.MsgspecError)


def put(key: str, value: bytes) -> None:
    """Keep `value`, instead of what was there. Raises one of `FAILURES`."""
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)


def get(key: str | bytes) -> bytes | None:
    """Return what is kept, None where nothing is. Raises one of `FAILURES`."""
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    return value


def delete(key: str | bytes) -> None:
    """Keep it no longer. Raises one of `FAILURES`."""
    internal_kv._internal_kv_del(key, namespace=NAMESPACE)


def create(key: str, value: bytes) -> bool:
    """Keep `value` where nothing is kept; return whether it is what is kept now. Raises one of `FAILURES`."""
    there = internal_kv._internal_kv_put(key, value, overwrite=False, namespace=NAMESPACE)
    return not there or get(key) == value  # a call that Ray repeats finds what it has put there


@contextmanager
def claim(
    key: str,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Callable[[], bool]]:
    """Claim `key` among all processes, once no other one holds it; yield what tells whether the claim still holds.

    A claim holds for `seconds`: who waits for it counts these by its own clock, so that one who died in it holds up
    nobody for longer, whatever anybody's time of day. Raises one of `FAILURES`.

    Each claim has a number, under which one process alone can have put its name, and the highest counts. It is never
    deleted, so that none is given twice.
    """
    number, until = _claimed(key, seconds, clock, sleep)
    try:
        yield lambda: clock() < until and _latest(key)[0] == number
    finally:
        put(_turn(key, number), FREE)


def _claimed(
    key: str, seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> tuple[int, float]:
    """Return the number of our claim, and until when it holds."""
    name = token_hex(8).encode()
    latest, since = _latest(key), clock()
    while True:
        number, holder = latest
        if holder == FREE or clock() - since >= seconds:
            began = clock()
            if create(_turn(key, number + 1), name) and _latest(key) == (number + 1, name):
                for older in keys(f"{key}/"):
                    if _number(older) <= number:
                        delete(older)
                return number + 1, began + seconds
        else:
            sleep(PAUSE)
        if (found := _latest(key)) != latest:
            latest, since = found, clock()


def _latest(key: str) -> tuple[int, bytes]:
    """Return the number of the last claim, and who holds it."""
    number = max((_number(one) for one in keys(f"{key}/")), default=0)
    return number, (get(_turn(key, number)) or FREE) if number else FREE


def _turn(key: str, number: int) -> str:
    return f"{key}/{number}"


def _number(turn: bytes) -> int:
    return int(turn.rpartition(b"/")[2])


def keys(prefix: str) -> list[bytes]:
    """Return the names that begin so. Raises one of `FAILURES`."""
    return list(internal_kv._internal_kv_list(prefix, namespace=NAMESPACE))
