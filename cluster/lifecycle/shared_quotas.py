"""Quotas hold over all routers of an app and outlive each of them: what one lets through, all of them count.

A router writes what was used at it to Ray's control store, and reads what the others wrote. What a router writes
outlives it, so its successor counts that as well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cluster.admission.quotas import MINUTE, Quotas, Usage
from cluster.lifecycle import control_store

logger = logging.getLogger(__name__)

EXCHANGE_SECONDS = 1.0  # so much of what a router let through is forgotten with it, and unknown to others
COUNTS_SECONDS = 2 * MINUTE  # for which a record says something of the sliding minute
KEPT_SECONDS = 3600.0  # far longer, since clocks of nodes may differ and jump
LOOP_PATIENCE = 5.0  # seconds that an event loop may be held up


class UsageRecord(msgspec.Struct, frozen=True):
    """What was used at one router. at: seconds since the epoch when it was written. used: see `Usage`."""

    at: float
    used: dict[int, dict[str, int]]


@dataclass(frozen=True, slots=True)
class _Heard:
    """A record as it was read last. apart: seconds by which our clock is ahead of its router's, as far as is known.

    Which is once the record changes between two looks, and so was written just before the second.
    """

    record: UsageRecord
    apart: float = 0.0


class SharedQuotas:
    """Keeps `quotas`, which are used on `loop`, in step with those of the app's other routers.

    In a thread of its own: when Ray's head is gone its calls block for a minute. Each router goes on alone then.
    """

    def __init__(
        self,
        app: str,
        router_id: str,
        quotas: Quotas,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._prefix = f"/{app}/used/"
        self._own = f"{self._prefix}{router_id}"
        self._quotas = quotas
        self._loop = loop
        self._clock = clock
        self._told: Usage = {}
        self._heard: dict[bytes, _Heard] = {}  # by key of the record
        self._failing = False

    def start(self) -> None:
        """Exchange again and again, for as long as the process lives."""
        threading.Thread(target=self._run, name="shared-quotas", daemon=True).start()

    def exchange(self) -> None:
        """Tell and hear once. Blocks, not to be called on the loop. Raises one of `control_store.FAILURES`."""
        used = self._quotas.used()
        if used != self._told:
            record = UsageRecord(self._clock(), {minute: dict(by) for minute, by in used.items()})
            control_store.put(self._own, msgspec.msgpack.encode(record))
            self._told = used
        for key in control_store.keys(self._prefix):
            if key.decode() != self._own:
                self._hear(key)

    def _hear(self, key: bytes) -> None:
        value = control_store.get(key)
        if value is None:
            return
        record = msgspec.msgpack.decode(value, type=UsageRecord)
        now, before = self._clock(), self._heard.get(key)
        heard = _Heard(record)
        if before is not None:
            is_new = record.at != before.record.at
            heard = _Heard(record, now - record.at if is_new else before.apart)
        self._heard[key] = heard  # first, so that nothing counts twice whose counting takes too long
        age = abs(now - record.at - heard.apart)
        if age > KEPT_SECONDS and before is not None:
            control_store.delete(key)
        if age > COUNTS_SECONDS:
            return
        shift, known = round(heard.apart / MINUTE), {} if before is None else before.record.used
        new = {minute + shift: more for minute, more in _beyond(record.used, known).items()}
        if new:
            asyncio.run_coroutine_threadsafe(self._quotas.add(new), self._loop).result(LOOP_PATIENCE)

    def _run(self) -> None:
        while not self._loop.is_closed():
            try:
                self.exchange()
            except (*control_store.FAILURES, TimeoutError) as error:
                if not self._failing:
                    logger.warning("what tenants use is not shared among routers: %r", error)
                self._failing = True
            else:
                self._failing = False
            time.sleep(EXCHANGE_SECONDS)


def _beyond(used: Usage, known: Usage) -> Usage:
    """Return what was used beyond what is known; less than nothing where something was taken back."""
    new = {
        minute: {key: amount - known.get(minute, {}).get(key, 0) for key, amount in by.items()}
        for minute, by in used.items()
    }
    return {minute: more for minute, by in new.items() if (more := {key: n for key, n in by.items() if n})}
