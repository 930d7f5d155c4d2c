"""A file and a batch, as they are kept and as clients see them. Times are seconds since 1970.

Source: OpenAI API reference, "Files" and "Batch".
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
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


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A state of a batch: all of OpenAI's fields, and whose it is. `cluster.batch.server.changes` makes the next one.

    number: of the state, from 0. runner: who alone may run it from this state on, "" = nobody yet. outcome: what it
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
        return self.status in ENDED

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
