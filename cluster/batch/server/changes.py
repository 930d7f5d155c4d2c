"""How the status of a batch changes. Each function returns the record after one change, with its time in it.

    validating -> in_progress -> finalizing -> completed
    validating, in_progress, finalizing -> failed
    validating, in_progress, finalizing -> cancelling -> cancelled
    validating, in_progress, finalizing -> expired

Beside these, a state may get another runner, or an outcome. Any other change raises `IllegalChangeError`.
`now`: seconds since 1970. Source: OpenAI API reference, "Batch".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from cluster.batch.server.errors import IllegalChangeError
from cluster.batch.server.objects import BatchRecord, LineError, Outcome, RequestCounts, Status

AFTER: Mapping[Status, frozenset[Status]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling", "expired"}),
    "in_progress": frozenset({"finalizing", "failed", "cancelling", "expired"}),
    "finalizing": frozenset({"completed", "failed", "cancelling", "expired"}),
    "cancelling": frozenset({"cancelled"}),
    "failed": frozenset(),
    "completed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}


def taken(record: BatchRecord, runner: str) -> BatchRecord:
    """Another runner runs it from now on."""
    if record.ended:
        raise IllegalChangeError(f"batch {record.id} is {record.status}: nobody runs it")
    return replace(record, runner=runner)


def begun(record: BatchRecord, now: int, rows: int, model: str | None = None) -> BatchRecord:
    """Its input is valid, and its rows run. model: that answers, where it is one for all rows."""
    return _changed(record, "in_progress", now, request_counts=RequestCounts(rows), model=model)


def counted(record: BatchRecord, counts: RequestCounts, waits_for: str | None = None) -> BatchRecord:
    """Tell how far it is, while rows run, and what they wait for: its status stays."""
    if record.status not in ("in_progress", "finalizing", "cancelling"):
        raise IllegalChangeError(f"batch {record.id} is {record.status}: no rows of it run")
    return replace(record, request_counts=counts, waits_for=waits_for)


def finalizing(record: BatchRecord, now: int, counts: RequestCounts) -> BatchRecord:
    """All rows have ended; its files are written."""
    return _changed(record, "finalizing", now, request_counts=counts)


def completed(record: BatchRecord, now: int, outcome: Outcome) -> BatchRecord:
    """Its files are there."""
    return _changed(record, "completed", now, **_left(outcome))


def failed(record: BatchRecord, now: int, errors: Sequence[LineError]) -> BatchRecord:
    """Its input cannot be run, or not any more, for these reasons; there is one at least."""
    if not errors:
        raise IllegalChangeError(f"batch {record.id} cannot have failed without an error that says why")
    return _changed(record, "failed", now, errors=tuple(errors))


def cancelling(record: BatchRecord, now: int, why: LineError | None = None) -> BatchRecord:
    """Its client wants it no more, or this server, which says why. now: when that was asked."""
    return _changed(record, "cancelling", now, errors=record.errors if why is None else (why,))


def cancelled(record: BatchRecord, now: int, outcome: Outcome) -> BatchRecord:
    """Nothing of it runs any more; what was done by then is there."""
    return _changed(record, "cancelled", now, **_left(outcome))


def expired(record: BatchRecord, now: int, outcome: Outcome) -> BatchRecord:
    """Its time is over; what was done by then is there."""
    return _changed(record, "expired", now, **_left(outcome))


def decided(record: BatchRecord, outcome: Outcome) -> BatchRecord:
    """What it leaves is there, and is not made again: whoever ends it tells of this, and its status stays."""
    if record.ended or record.outcome is not None:
        raise IllegalChangeError(f"batch {record.id} is {record.status}: what it leaves is decided already")
    return replace(record, outcome=outcome)


def ended(record: BatchRecord, now: int, outcome: Outcome) -> BatchRecord:
    """It leaves `outcome`: as its client was told that it is cancelled, else as its rows ended."""
    if record.status == "cancelling":
        return cancelled(record, now, outcome)
    return expired(record, now, outcome) if outcome.expired else completed(record, now, outcome)


def _changed(record: BatchRecord, status: Status, now: int, **more: Any) -> BatchRecord:
    if status not in AFTER[record.status]:
        raise IllegalChangeError(f"batch {record.id} is {record.status} and cannot become {status}")
    return replace(record, status=status, waits_for=None, **{f"{status}_at": now}, **more)


def _left(outcome: Outcome) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "request_counts": outcome.counts,
        "output_file_id": outcome.output_file_id,
        "error_file_id": outcome.error_file_id,
        "usage": outcome.usage,
    }
