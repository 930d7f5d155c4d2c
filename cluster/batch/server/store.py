"""What clients may do with files and batches. Everything belongs to a tenant; to others it is not there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from cluster.batch.server.batch_store import BatchStore
from cluster.batch.server.file_store import FileStore
from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.objects import WINDOW_SECONDS, BatchRecord, StoredFile
from cluster.batch.server.root import Draft, Root
from cluster.errors import ApiError

MOST_FILES = 10_000  # of one tenant: each list, upload and sweep looks at the names of all
MOST_OPEN = 1000  # batches of one tenant that have not ended: a runner looks at all of them every second


class OnCreated(Protocol):
    """Told of each new batch, on the event loop, once it is kept. Must not block or raise.

    It saves a runner's waiting, and no more: batches that others made, or that were made while there was no runner,
    are found by `BatchStore.unended`.
    """

    def __call__(self, record: BatchRecord, /) -> None:
        """Take note."""
        ...


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a client asks for; checked. output_expires_after: seconds, see `BatchRecord`."""

    input_file_id: str
    endpoint: str
    metadata: Mapping[str, str] | None = None
    output_expires_after: int | None = None


class Store:
    """All methods block; they raise `ApiError`, and `OSError` where the root fails.

    max_file_bytes: of one upload. on_created: see there; None = there is no listener.
    """

    def __init__(self, root: Root, max_file_bytes: int, on_created: OnCreated | None = None) -> None:
        self.files = FileStore(root)
        self.batches = BatchStore(root)
        self.root = root
        self.max_file_bytes = max_file_bytes
        self._on_created = on_created

    def sweep(self) -> None:
        """Remove what killed processes left in the middle of writing it."""
        self.root.sweep()

    def keep_input(
        self, draft: Draft, tenant: str, filename: str, most: int | None = None, expires_after: int | None = None
    ) -> StoredFile:
        """Make a file of what a client sent as the input of batches; 413 beyond the tenant's quota, or `MOST_FILES`.

        most: that quota, in bytes; None = it has none. Of uploads that come at the same time each counts itself, and
        then looks again: none passes unseen.
        """
        self._check_number(tenant)
        if most is None:
            return self.files.add(draft, tenant, filename, "batch", expires_after)
        self._check_room(tenant, most, draft.size)
        stored = self.files.add(draft, tenant, filename, "batch", expires_after)
        try:
            self._check_room(tenant, most, 0)
        except BaseException:
            self.files.remove(stored.id)
            raise
        return stored

    def room_left(self, tenant: str, most: int) -> int:
        """Return how many bytes a tenant may still upload; 413 where that is none. most: its quota, in bytes."""
        return most - self._check_room(tenant, most, 1)

    def delete_expired(self, stored: StoredFile) -> None:
        """Delete a file whose time is over, unless a batch uses it, which is looked at again the next time."""
        with suppress(ApiError):
            self.delete_file(stored.id, stored.tenant)

    def file(self, file_id: str, tenant: str) -> StoredFile:
        """Return a file; 404 where the tenant has none of this id."""
        stored = self.files.get(file_id, tenant)
        if stored is None:
            raise _no_file(file_id)
        return stored

    def open_file(self, file_id: str, tenant: str) -> tuple[StoredFile, BinaryIO]:
        """Return a file, and its content to read and close; 404 as in `file`."""
        stored = self.file(file_id, tenant)
        try:
            return stored, self.files.open(stored)
        except FileNotFoundError:
            raise _no_file(file_id) from None

    def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete a file; 404 as in `file`, 409 while a batch that has not ended uses it.

        The file is marked before batches are looked at, and a new batch is announced before it looks for marks: of
        two that meet, at least one sees the other and gives way.
        """
        self.file(file_id, tenant)
        mark = self.files.mark_deleting(file_id)
        try:
            self._check_unused(file_id, tenant)
        except BaseException:
            self.files.unmark(mark)
            raise
        self.files.remove(file_id)

    def create_batch(self, new: NewBatch, tenant: str, most: int | None = None) -> BatchRecord:
        """Keep a new batch. 404 for an input that the tenant does not have, 400 for one that is no input.

        429 where `MOST_OPEN` of the tenant's have not ended. most: the tenant's quota of bytes, None = it has none;
        413 where nothing is left for its output.
        """
        self._check_input(new.input_file_id, tenant)
        self._check_number(tenant)
        if self.batches.num_open(tenant) >= MOST_OPEN:
            raise _too_many_batches()
        if most is not None:
            self.room_left(tenant, most)
        batch_id = BATCH_IDS.new(tenant)
        created = BATCH_IDS.made_at(batch_id)
        record = BatchRecord(
            id=batch_id,
            tenant=tenant,
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            created_at=created,
            expires_at=created + WINDOW_SECONDS,
            metadata=None if new.metadata is None else dict(new.metadata),
            output_expires_after=new.output_expires_after,
        )
        self.batches.announce(batch_id, new.input_file_id)
        try:
            self._check_input(new.input_file_id, tenant)
        except BaseException:
            self.batches.drop(batch_id)
            raise
        self.batches.note(record)
        return record

    def notify_created(self, record: BatchRecord) -> None:
        """Notify the listener of a new batch. On the event loop."""
        if self._on_created is not None:
            self._on_created(record)

    def batch(self, batch_id: str, tenant: str) -> BatchRecord:
        """Return a batch; 404 where the tenant has none of this id."""
        record = self.batches.get(batch_id, tenant)
        if record is None:
            raise ApiError("not_found", f"there is no batch {batch_id[:64]!r}; GET /v1/batches lists them")
        return record

    def cancel_batch(self, batch_id: str, tenant: str) -> BatchRecord:
        """Ask for the end of a batch; 404 as in `batch`, 409 for one that ended otherwise. Can be called again."""
        record = self.batch(batch_id, tenant)
        if record.status in ("cancelling", "cancelled"):
            return record
        if record.ended:
            raise ApiError(
                "batch_ended", f"batch {batch_id} is {record.status}: only one that runs can be cancelled", status=409
            )
        self.batches.ask_cancel(batch_id, int(time.time()))
        return self.batch(batch_id, tenant)

    def _check_number(self, tenant: str) -> None:
        """Raise `ApiError` where a tenant may have no more files."""
        if self.files.count(tenant) >= MOST_FILES:
            raise _full(f"this tenant has {MOST_FILES} files and may have no more")

    def _check_room(self, tenant: str, most: int, more: int) -> int:
        """Return the bytes that a tenant has stored; raises `ApiError` where `more` would be too many."""
        used = self.files.stored_bytes(tenant)
        if used + more > most:
            raise storage_full(most)
        return used

    def _check_unused(self, file_id: str, tenant: str) -> None:
        user = self.batches.user_of(file_id, tenant)
        if user is not None:
            raise ApiError(
                "file_in_use",
                f"file {file_id} is used by batch {user}, which has not ended; wait for its end, or cancel it",
                status=409,
            )

    def _check_input(self, file_id: str, tenant: str) -> None:
        stored = self.files.get(file_id, tenant)
        if stored is None:
            raise _no_file(file_id, "input_file_id")
        if stored.purpose != "batch":
            raise ApiError(
                "invalid_value",
                f"input_file_id {file_id} is the output of a batch; upload the input with purpose 'batch'",
                param="input_file_id",
            )
        if self.files.is_deleting(file_id):
            raise ApiError(
                "file_in_use",
                f"file {file_id} is being deleted; upload it again",
                param="input_file_id",
                status=409,
            )


def storage_full(most: int) -> ApiError:
    """Return the error of a tenant that has no room for more. most: its quota, in bytes."""
    return _full(
        f"the files of this tenant may take {most} bytes (its quota max_stored_bytes), and this would be more"
    )


def _full(why: str) -> ApiError:
    message = f"{why}; GET /v1/files lists them, DELETE /v1/files/ID makes room"
    return ApiError("storage_quota_exceeded", message, status=413)


def _too_many_batches() -> ApiError:
    message = f"{MOST_OPEN} batches of this tenant have not ended; wait for the end of one, or cancel some"
    return ApiError("too_many_batches", message, status=429, retry_after=60)


def _no_file(file_id: str, param: str | None = None) -> ApiError:
    return ApiError("not_found", f"there is no file {file_id[:64]!r}; GET /v1/files lists them", param=param)
