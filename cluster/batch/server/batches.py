"""Batches by id. Who writes what:

`batches/ID/batch.json`: the record; written once by whoever creates it, from then on by its runner alone.
`batches/ID/cancel`: the wish to end it, which any process leaves there and the runner finds.
`open/ID`: its mark while it has not ended, so that nobody looks through all that ever were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from cluster.batch.server.changes import as_asked
from cluster.batch.server.errors import StoreError
from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.objects import BatchRecord
from cluster.batch.server.pages import READ_AT_ONCE, Asked, Page, page_of
from cluster.batch.server.root import Root

FOLDER = "batches"
OPEN = "open"
RECORD, CANCEL = "batch.json", "cancel"
# Seconds after which a mark without a record is that of a process that was killed between the two.
STALE = 3600


class CancelWish(msgspec.Struct, frozen=True):
    """asked_at: seconds since 1970."""

    asked_at: int


class BatchStore:
    """All methods block, and raise `OSError`."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def create(self, record: BatchRecord) -> None:
        """Keep a new batch."""
        self._root.write(_mark(record.id), b"")
        self._root.write(_path(record.id, RECORD), msgspec.json.encode(record))

    def drop(self, batch_id: str) -> None:
        """Take a new batch back, of which nobody was told."""
        self._root.remove(f"{FOLDER}/{batch_id}")
        self._root.remove(_mark(batch_id))

    def write(self, record: BatchRecord) -> None:
        """Keep a change. For the batch's runner alone, which `cluster.batch.ledger.epoch` lets be one at a time."""
        self._root.write(_path(record.id, RECORD), msgspec.json.encode(record))
        if record.ended:
            self._root.remove(_mark(record.id))

    def read(self, batch_id: str) -> BatchRecord | None:
        """Return a record as it was written, whoever's it is. For the runner. batch_id: one of ours."""
        return _record(self._root.read(_path(batch_id, RECORD)), batch_id)

    def get(self, batch_id: str, tenant: str) -> BatchRecord | None:
        """Return a tenant's batch as its client sees it, None where it has none of this id, however that is spelt."""
        record = self.read(batch_id) if BATCH_IDS.fits(batch_id) else None
        if record is None or record.tenant != tenant:
            return None
        return as_asked(record, None if record.ended else self.cancel_asked_at(batch_id))

    def page(self, tenant: str, asked: Asked) -> Page[BatchRecord]:
        """Return a page of a tenant's batches, as their client sees them."""
        ids = [one for one in self._root.names(FOLDER) if BATCH_IDS.may_be_of(one, tenant)]
        return page_of(ids, asked, lambda some: self._listed(some, tenant))

    def ask_cancel(self, batch_id: str, now: int) -> None:
        """Leave the wish to end a batch. A wish that is there already stays as it is."""
        if self.cancel_asked_at(batch_id) is None:
            self._root.write(_path(batch_id, CANCEL), msgspec.json.encode(CancelWish(now)))

    def cancel_asked_at(self, batch_id: str) -> int | None:
        """Return when the end of a batch was asked for, None where it was not."""
        return _asked_at(self._root.read(_path(batch_id, CANCEL)), batch_id)

    def unended(
        self, tenant: str | None = None, on_damaged: Callable[[StoreError], None] | None = None
    ) -> Iterator[BatchRecord]:
        """Yield the records of batches that have not ended, as they were written, the oldest first.

        tenant: whose, None = all tenants'. on_damaged: told of records that cannot be read, which are left out; None
        = they are raised. Marks that stand for nothing are removed on the way.
        """
        marked = sorted(one for one in self._root.names(OPEN) if _may_be_of(one, tenant))
        for start in range(0, len(marked), READ_AT_ONCE):
            ids = marked[start : start + READ_AT_ONCE]
            found = self._root.read_all([_path(one, RECORD) for one in ids])
            for batch_id, data in zip(ids, found, strict=True):
                try:
                    record = _record(data, batch_id)
                except StoreError as error:
                    if on_damaged is None:
                        raise
                    on_damaged(error)
                    continue
                if record is not None and not record.ended:
                    yield record
                elif record is not None or BATCH_IDS.made_at(batch_id) < time.time() - STALE:
                    self._root.remove(_mark(batch_id))

    def user_of(self, file_id: str, tenant: str) -> str | None:
        """Return the id of a tenant's batch that has not ended and uses a file, None where there is none."""
        return next((one.id for one in self.unended(tenant) if file_id in one.file_ids), None)

    def _listed(self, ids: Sequence[str], tenant: str) -> Iterable[BatchRecord | None]:
        records = self._records(ids)
        running = [one.id for one in records if one is not None and not one.ended]
        wishes = self._root.read_all([_path(one, CANCEL) for one in running])
        asked = {one: _asked_at(wish, one) for one, wish in zip(running, wishes, strict=True)}
        for record in records:
            own = record is not None and record.tenant == tenant
            yield as_asked(record, asked.get(record.id)) if own and record is not None else None

    def _records(self, ids: Sequence[str]) -> list[BatchRecord | None]:
        found = self._root.read_all([_path(one, RECORD) for one in ids])
        return [_record(data, batch_id) for batch_id, data in zip(ids, found, strict=True)]


def _path(batch_id: str, name: str) -> str:
    return f"{FOLDER}/{batch_id}/{name}"


def _mark(batch_id: str) -> str:
    return f"{OPEN}/{batch_id}"


def _may_be_of(name: str, tenant: str | None) -> bool:
    return BATCH_IDS.fits(name) if tenant is None else BATCH_IDS.may_be_of(name, tenant)


def _record(data: bytes | None, batch_id: str) -> BatchRecord | None:
    try:
        return None if data is None else msgspec.json.decode(data, type=BatchRecord)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{_path(batch_id, RECORD)} is damaged ({error})") from error


def _asked_at(data: bytes | None, batch_id: str) -> int | None:
    try:
        return None if data is None else msgspec.json.decode(data, type=CancelWish).asked_at
    except msgspec.MsgspecError as error:
        raise StoreError(f"{_path(batch_id, CANCEL)} is damaged ({error})") from error
