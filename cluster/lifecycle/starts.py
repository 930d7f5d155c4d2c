"""What is remembered of the starts of a deployment's replicas, and how long the next one waits. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import msgspec

# Seconds between being ready and death below which a life counts as a failed start: it died of what it is.
SHORT_LIFE = 8.0
FREE_FAILURES = 2  # in a row, before anybody waits
LONGEST_PAUSE = 60.0
MAX_REASON = 400


class StartRecord(msgspec.Struct, frozen=True):
    """One start of one replica, as it last told of itself. Times are seconds since the epoch, of its node's clock.

    actor: the name by which Ray knows it. state: `waiting` (held back after failures, until `next_try`), `starting`
    (in `phase`), `ready` or `failed` (`reason`). since: when the state or phase began. failures: failed starts in a
    row before this one, the last for `last_reason`.
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


def failures_in_a_row(records: Iterable[StartRecord], alive: Collection[str], now: float) -> tuple[int, str]:
    """Return how often starts failed, one after the other, up to now, and why the last one did.

    alive: names of the actors that live. Replicas that failed side by side count once, and those that are still
    starting prove nothing.
    """
    failures, reason = 0, ""
    for record in sorted(records, key=lambda record: record.began, reverse=True):
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
        return "its process ended as soon as it was ready" if now - record.since < SHORT_LIFE else ""
    where = f" ({record.phase})" if record.phase else ""
    return f"its process ended while it was starting{where}"
