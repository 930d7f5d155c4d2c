"""One start of a replica: held back after failed ones, and told of as it goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from cluster.lifecycle.starts import MAX_REASON, SHORT_LIFE, StartRecord, failures_in_a_row, pause

logger = logging.getLogger(__name__)


class Register(Protocol):
    """What is needed of `cluster.lifecycle.start_register.StartRegister`."""

    def put(self, record: StartRecord) -> None:
        """Remember a record."""

    def of_version(self) -> list[StartRecord]:
        """Return the records of this version."""
        ...

    def prune(self, alive: set[str], now: float) -> None:
        """Forget what died long ago."""


class Start:
    """Tells `register` of the start of `replica_id`, which Ray knows as `actor`.

    alive: returns the names of the actors that live, None where that is not known: then nobody is held back.
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
        now = clock()
        self._record = StartRecord(replica_id, actor, now, now)

    def hold_back(self) -> None:
        """Wait as long as the starts before this one advise: one that dies at once must not keep the machine busy."""
        now = self._clock()
        failures, reason = self._failures(now)
        seconds = pause(failures)
        self._tell(
            state="waiting" if seconds else "starting",
            failures=failures,
            last_reason=reason,
            next_try=now + seconds if seconds else 0.0,
        )
        if seconds:
            logger.warning("%d starts failed, the last because: %s; next try in %g s", failures, reason, seconds)
            self._sleep(seconds)
            self._tell(state="starting")

    def phase(self, name: str) -> None:
        """Tell that the start came to a phase."""
        self._tell(state="starting", phase=name)

    def ready(self) -> None:
        """Tell that the replica can serve."""
        self._tell(state="ready", phase="")

    def failed(self, reason: str) -> None:
        """Tell why the replica does not start."""
        self._tell(state="failed", reason=" ".join(reason.split())[:MAX_REASON])

    def died(self, reason: str) -> None:
        """Tell why the replica ends, if it has hardly begun to serve: then it is the start that failed."""
        if self._clock() - self._record.since < SHORT_LIFE:
            self.failed(reason)

    def _failures(self, now: float) -> tuple[int, str]:
        alive = self._alive()
        if alive is None:
            return 0, ""
        self._register.prune(alive, now)
        return failures_in_a_row(self._register.of_version(), alive, now)

    def _tell(self, **changes: object) -> None:
        self._record = msgspec.structs.replace(self._record, since=self._clock(), **changes)
        self._register.put(self._record)
