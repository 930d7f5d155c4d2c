"""Starts of a deployment's replicas: what each reports, and how long the next one waits after failed ones. Pure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Literal, Protocol

import msgspec

# Seconds between being ready and death below which a life counts as a failed start: it died of what it is.
SHORT_LIFE = 8.0
FREE_FAILURES = 2  # in a row, before a start is delayed
LONGEST_PAUSE = 60.0
MAX_REASON = 400
SHARE_SECONDS = 1.0  # between two reports of a share
logger = logging.getLogger(__name__)


class StartRecord(msgspec.Struct, frozen=True):
    """One start of one replica, as it last reported. Times are seconds since the epoch, of its node's clock.

    actor: the name by which Ray knows it. state: `waiting` (held back after failures, until `next_try`), `starting`
    (in `phase`), `ready` or `failed` (`reason`). since: when the state or phase began. share: of the phase that is
    done, 0 to 1, 0 where that is not known. failures: failed starts in a row before this one, the last for
    `last_reason`. number: higher than of all that it saw before it, for clocks of nodes differ.
    """

    replica_id: str
    actor: str
    began: float
    since: float
    state: Literal["waiting", "starting", "ready", "failed"] = "starting"
    phase: str = ""
    reason: str = ""
    next_try: float = 0.0
    failures: int = 0
    last_reason: str = ""
    share: float = 0.0
    number: int = 0


def failures_in_a_row(records: Iterable[StartRecord], alive: Collection[str], now: float) -> tuple[int, str]:
    """Return how often starts failed, one after the other, up to now, and why the last one did.

    alive: names of the actors that live. Replicas that failed side by side count once, and those that are still
    starting prove nothing.
    """
    failures, reason = 0, ""
    for record in sorted(records, key=lambda record: (record.number, record.began), reverse=True):
        why = _failure(record, record.actor in alive, now)
        if why:
            failures = max(failures, record.failures + 1)
            reason = reason or why
        elif record.state == "ready":
            break
    return failures, reason


def failed_before(starts: Iterable[tuple[StartRecord, bool]]) -> int:
    """Return how many starts failed in a row before one that goes on now, of those with the most; 0 without any.

    starts: records, each with whether its process lives. Failures that nobody goes on from are over.
    """
    going_on = (record for record, lives in starts if lives and record.state != "ready")
    return max((record.failures + (record.state == "failed") for record in going_on), default=0)


def pause(failures: int) -> float:
    """Return the seconds that a start waits after so many failed ones: 0, 0, 1, 2, 4, ... 60."""
    if failures < FREE_FAILURES:
        return 0.0
    return min(LONGEST_PAUSE, 2.0 ** min(failures - FREE_FAILURES, 10))


def _failure(record: StartRecord, alive: bool, now: float) -> str:
    if record.state == "failed":
        return record.reason or "it failed without a reason"
    if alive:
        return ""
    if record.state == "ready":
        return "its process ended as soon as it was ready" if abs(now - record.since) < SHORT_LIFE else ""
    where = f" ({record.phase})" if record.phase else ""
    return f"its process ended while it was starting{where}"


class Register(Protocol):
    """What is needed of `cluster.lifecycle.control_store.StartRegister`."""

    def put(self, record: StartRecord) -> None:
        """Remember a record."""

    def of_version(self) -> list[StartRecord]:
        """Return the records of this version."""
        ...

    def prune(self, alive: set[str], now: float) -> None:
        """Forget what died long ago."""


class Start:
    """Tells `register` of the start of `replica_id`, which Ray knows as `actor`.

    alive: returns the names of the actors that live, None where that is not known: then no start is delayed.
    clock: seconds since the epoch.
    """

    def __init__(
        self,
        register: Register,
        replica_id: str,
        actor: str,
        alive: Callable[[], set[str] | None],
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._register = register
        self._alive = alive
        self._clock = clock
        self._sleep = sleep
        now = self._told = clock()
        self._record = StartRecord(replica_id, actor, now, now)

    def hold_back(self) -> None:
        """Wait as long as the starts before this one advise: one that dies at once must not keep the machine busy."""
        now = self._clock()
        failures, reason = self._failures(now)
        seconds = pause(failures)
        self._report(
            state="waiting" if seconds else "starting",
            failures=failures,
            last_reason=reason,
            next_try=now + seconds if seconds else 0.0,
        )
        if seconds:
            logger.warning("%d starts failed, the last because: %s; next try in %g s", failures, reason, seconds)
            self._sleep(seconds)
            self._report(state="starting")

    def phase(self, name: str, share: float | None = None) -> None:
        """Tell that the start came to a phase; with a share, how much of it is done, once a second at most."""
        if share is None:
            self._report(state="starting", phase=name, share=0.0)
        elif self._record.state == "starting" and self._clock() - self._told >= SHARE_SECONDS:
            self._put(msgspec.structs.replace(self._record, phase=name, share=share))

    def ready(self) -> None:
        """Tell that the replica can serve."""
        self._report(state="ready", phase="", share=0.0)

    def failed(self, reason: str) -> None:
        """Tell why the replica does not start."""
        self._report(state="failed", reason=" ".join(reason.split())[:MAX_REASON])

    def died(self, reason: str) -> None:
        """Tell why the replica ends, if it has hardly begun to serve: then it is the start that failed."""
        if self._clock() - self._record.since < SHORT_LIFE:
            self.failed(reason)

    def _failures(self, now: float) -> tuple[int, str]:
        alive = self._alive()
        if alive is None:
            return 0, ""
        self._register.prune(alive, now)
        records = self._register.of_version()
        number = 1 + max((one.number for one in records), default=0)
        self._record = msgspec.structs.replace(self._record, number=number)
        return failures_in_a_row(records, alive, now)

    def _report(self, **changes: object) -> None:
        self._put(msgspec.structs.replace(self._record, since=self._clock(), **changes))

    def _put(self, record: StartRecord) -> None:
        self._record, self._told = record, self._clock()
        self._register.put(record)
