"""Ray's control store: a few bytes under a name, which outlive every process of ours and are read on every node.

`ray.experimental.internal_kv` is not public. This is the only file that uses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from ray.exceptions import RayError
from ray.experimental import internal_kv

NAMESPACE = b"squadron"
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


@contextmanager
def claim(key: str, seconds: float) -> Iterator[bool]:
    """Say whether nobody else has claimed `key`, and claim it until the block ends, or for `seconds` if we die in it.

    Two that claim it in the same millisecond may both have it. Raises one of `FAILURES`.
    """
    held = get(key)
    if held is not None and abs(time.time() - float(held)) < seconds:
        yield False
        return
    put(key, str(time.time()).encode())
    try:
        yield True
    finally:
        delete(key)


def keys(prefix: str) -> list[bytes]:
    """Return the names that begin so. Raises one of `FAILURES`."""
    return list(internal_kv._internal_kv_list(prefix, namespace=NAMESPACE))
