"""Ray's control store: a few bytes under a name, which outlive every process of ours and are read on every node.

`ray.experimental.internal_kv` is not public. This is the only file that uses it. Replicas record their starts there;
where the store fails, starts are not held back and not recorded, and all else goes on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from secrets import token_hex
from typing import Any

import msgspec
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util import list_named_actors

from cluster.lifecycle.starts import StartRecord

NAMESPACE = b"squadron"
FREE = b"free"  # what a claim holds that has ended
PAUSE = 0.5  # seconds between two looks at a claim that another process holds
# What Ray raises here: its own errors, and plain ones of its client of the control store; and what decoding raises.
FAILURES = (RayError, RuntimeError, OSError, AttributeError, AssertionError, msgspec.MsgspecError)
logger = logging.getLogger(__name__)
KEPT_SECONDS = 900.0  # records of dead replicas
_DECODER = msgspec.msgpack.Decoder(StartRecord)


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
    """Claim `key` among all processes, once no other one holds it; yield what says whether the claim still holds.

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


class StartRegister:
    """The records of one deployment of one app; `version` tells the settings apart that they were started with."""

    def __init__(self, app: str, deployment: str, version: str = "") -> None:
        self._all = f"{app}/{deployment}/"
        self._mine = f"{self._all}{version}/"

    def put(self, record: StartRecord) -> None:
        """Remember a record, instead of an earlier one of the same replica."""
        try:
            put(self._mine + record.replica_id, msgspec.msgpack.encode(record))
        except FAILURES as error:
            logger.warning("the start of replica %s is not recorded: %r", record.replica_id, error)

    def of_version(self) -> list[StartRecord]:
        """Return the records of this version."""
        return list(self._read(self._mine).values())

    def of_all_versions(self) -> list[StartRecord]:
        """Return the records of all versions."""
        return list(self._read(self._all).values())

    def prune(self, alive: set[str], now: float) -> None:
        """Forget what died long ago."""
        for key, record in self._read(self._all).items():
            if record.actor not in alive and now - record.since > KEPT_SECONDS:
                self._forget(key)

    def _forget(self, key: bytes) -> None:
        try:
            delete(key)
        except FAILURES as error:
            logger.warning("an old start stays on record: %r", error)

    def _read(self, prefix: str) -> Mapping[bytes, StartRecord]:
        found: dict[bytes, StartRecord] = {}
        try:
            for key in keys(prefix):
                value = get(key)
                if value is not None:
                    found[key] = _DECODER.decode(value)
        except FAILURES as error:
            logger.warning("earlier starts are not known: %r", error)
        return found


def living_actors() -> set[str] | None:
    """Return the names of all named actors that live, Serve's replicas among them; None where Ray does not say."""
    try:
        return {str(actor["name"]) for actor in list_named_actors(all_namespaces=True)}
    except FAILURES as error:
        logger.warning("it is not known which actors live: %r", error)
        return None


def version_of(settings: Mapping[str, Any]) -> str:
    """Return a short hash of settings."""
    return hashlib.blake2b(msgspec.json.encode(dict(sorted(settings.items()))), digest_size=4).hexdigest()
