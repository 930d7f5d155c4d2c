"""A file and a batch, as they are kept and as clients see them, and how the status of a batch changes.

    validating -> in_progress -> finalizing -> completed
    validating, in_progress, finalizing -> failed
    validating, in_progress, finalizing -> cancelling -> cancelled
    validating, in_progress, finalizing -> expired

Beside these, a state may get another runner, or an outcome. Any other change raises `IllegalChangeError`. Times are
seconds since 1970.

Source: OpenAI API reference, "Files" and "Batch".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from cluster.batch.errors import IllegalChangeError

Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
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
WINDOW = "24h"
WINDOW_SECONDS = 24 * 3600


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is whole. filename: a label. size: bytes of its content, which lies there as `stored_as`.

    expires_at: from when on it is deleted by itself, None = never.
    """

    id: str
    tenant: str
    filename: str
    purpose: Purpose
    size: int
    created_at: int
    stored_as: str = "content"
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class RequestCounts(msgspec.Struct, frozen=True):
    """Rows of a batch: all of them, and those that ended either way."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a batch. cached_tokens: of the input, found in a prefix cache. reasoning_tokens: of the output."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's usage object of a batch."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Why an input cannot be run. line: of the input, from 1; None = the whole of it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What a batch leaves. output_file_id: of its answers, error_file_id: of rows that failed; None without such.

    files: what is told of these once it has ended. expired: whether rows were left when its time was over.
    """

    counts: RequestCounts
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: BatchUsage | None = None
    files: tuple[StoredFile, ...] = ()
    expired: bool = False

    def fields(self) -> dict[str, Any]:
        """Return what a batch's record holds of this at its end."""
        return {
            "outcome": self,
            "request_counts": self.counts,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "usage": self.usage,
        }


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A state of a batch: all of OpenAI's fields, and whose it is. Its methods make the next one.

    number: of the state, from 0. runner: who alone may run it from this state on, "" = none yet. outcome: what it
    will leave, once that is decided. waits_for: why none of its rows begins now, None where there is no such reason;
    OpenAI has no such field. output_expires_after: seconds for which its files are kept, None = no end.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    number: int = 0
    runner: str = ""
    outcome: Outcome | None = None
    waits_for: str | None = None
    output_expires_after: int | None = None
    completion_window: str = WINDOW
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    model: str | None = None
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def ended(self) -> bool:
        """Whether it has a status that never changes."""
        return not AFTER[self.status]

    @property
    def file_ids(self) -> tuple[str | None, ...]:
        """The files that it needs."""
        return self.input_file_id, self.output_file_id, self.error_file_id

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        for ours in ("tenant", "number", "runner", "outcome", "output_expires_after"):
            del told[ours]
        if self.waits_for is None:
            del told["waits_for"]
        errors = {"object": "list", "data": list(told["errors"])} if self.errors else None
        usage = None if self.usage is None else self.usage.shown()
        return {**told, "object": "batch", "errors": errors, "usage": usage}

    def taken(self, runner: str) -> BatchRecord:
        """Another runner runs it from now on."""
        if self.ended:
            raise IllegalChangeError(f"batch {self.id} is {self.status}: nobody runs it")
        return replace(self, runner=runner)

    def begun(self, now: int, rows: int, model: str | None = None) -> BatchRecord:
        """Its input is valid, and its rows run. model: that answers, where it is one for all rows."""
        return self._changed("in_progress", now, request_counts=RequestCounts(rows), model=model)

    def counted(self, counts: RequestCounts, waits_for: str | None = None) -> BatchRecord:
        """Tell how far it is, while rows run, and what they wait for: its status stays."""
        if self.status not in ("in_progress", "finalizing", "cancelling"):
            raise IllegalChangeError(f"batch {self.id} is {self.status}: no rows of it run")
        return replace(self, request_counts=counts, waits_for=waits_for)

    def finalizing(self, now: int, counts: RequestCounts) -> BatchRecord:
        """All rows have ended; its files are written."""
        return self._changed("finalizing", now, request_counts=counts)

    def completed(self, now: int, outcome: Outcome) -> BatchRecord:
        """Its files are there."""
        return self._changed("completed", now, **outcome.fields())

    def failed(self, now: int, errors: Sequence[LineError]) -> BatchRecord:
        """Its input cannot be run, or not any more, for these reasons; there is one at least."""
        if not errors:
            raise IllegalChangeError(f"batch {self.id} cannot have failed without an error that says why")
        return self._changed("failed", now, errors=tuple(errors))

    def cancelling(self, now: int, why: LineError | None = None) -> BatchRecord:
        """Its client wants it no more, or this server, which says why. now: when that was asked."""
        return self._changed("cancelling", now, errors=self.errors if why is None else (why,))

    def cancelled(self, now: int, outcome: Outcome) -> BatchRecord:
        """Nothing of it runs any more; what was done by then is there."""
        return self._changed("cancelled", now, **outcome.fields())

    def expired(self, now: int, outcome: Outcome) -> BatchRecord:
        """Its time is over; what was done by then is there."""
        return self._changed("expired", now, **outcome.fields())

    def decided(self, outcome: Outcome) -> BatchRecord:
        """Whether its outcome is stored: it is not made again, and its status stays."""
        if self.ended or self.outcome is not None:
            raise IllegalChangeError(f"batch {self.id} is {self.status}: what it leaves is decided already")
        return replace(self, outcome=outcome)

    def finished(self, now: int, outcome: Outcome) -> BatchRecord:
        """It leaves `outcome`: as cancelled where its client was answered so, else as its rows ended."""
        if self.status == "cancelling":
            return self.cancelled(now, outcome)
        return self.expired(now, outcome) if outcome.expired else self.completed(now, outcome)

    def _changed(self, status: Status, now: int, **more: Any) -> BatchRecord:
        if status not in AFTER[self.status]:
            raise IllegalChangeError(f"batch {self.id} is {self.status} and cannot become {status}")
        return replace(self, status=status, waits_for=None, **{f"{status}_at": now}, **more)
