"""Batches by id. Who writes what:

`batches/ID/batch.json`: the record; written once by whoever creates it, from then on by its runner alone.
`batches/ID/cancel`: the wish to end it, which any process leaves there and the runner finds.
`open/ID`: its mark while it has not ended, so that nobody looks through all that ever were. It holds the id of the
input and is there before the record, which is written once it is certain that the input stays: a batch that is taken
back never was one to any runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from cluster.batch.server.changes import as_asked
from cluster.batch.server.errors import StoreError
from cluster.batch.server.ids import BATCH_IDS, output_ids
from cluster.batch.server.objects import BatchRecord
from cluster.batch.server.pages import READ_AT_ONCE, Asked, Page, page_of
from cluster.batch.server.root import Root

FOLDER = "batches"
OPEN = "open"
RECORD, CANCEL = "batch.json", "cancel"
# Seconds after which a mark without a record is that of a process that was killed between the two.
STALE = 3600


OnDamaged = Callable[[StoreError], None]


class CancelWish(msgspec.Struct, frozen=True):
    """asked_at: seconds since 1970."""

    asked_at: int


class BatchStore:
    """All methods block, and raise `OSError`."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def announce(self, batch_id: str, input_file_id: str) -> None:
        """Mark a batch that is about to be created, so that its input stays. Of a killed process it is gone later."""
        self._root.write(_mark(batch_id), input_file_id.encode())

    def drop(self, batch_id: str) -> None:
        """Take the mark back of a batch that was not created."""
        self._root.remove(_mark(batch_id))

    def write(self, record: BatchRecord) -> None:
        """Keep a batch that was announced, or a change of it.

        Changes are its runner's alone, which `cluster.batch.ledger.epoch` lets be one at a time.
        """
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

    def unended(self, on_damaged: OnDamaged | None = None) -> Iterator[BatchRecord]:
        """Yield the records of batches that have not ended, as they were written, the oldest first.

        on_damaged: told of records that cannot be read, which are left out; None = they are raised. Marks that stand
        for nothing are removed on the way.
        """
        marked = sorted(one for one in self._root.names(OPEN) if BATCH_IDS.fits(one))
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
        """Return the id of a tenant's batch that has not ended and uses a file, None where there is none.

        It uses its input, and its output from before it is written.
        """
        marked = sorted(one for one in self._root.names(OPEN) if BATCH_IDS.may_be_of(one, tenant))
        inputs = self._root.read_all([_mark(one) for one in marked])
        users = (
            batch_id
            for batch_id, its_input in zip(marked, inputs, strict=True)
            if its_input == file_id.encode() or file_id in output_ids(batch_id)
        )
        return next((one for one in users if not self._has_ended(one)), None)

    def as_asked(self, records: Sequence[BatchRecord], on_damaged: OnDamaged | None = None) -> Iterator[BatchRecord]:
        """Yield batches as their clients see them. on_damaged: told of wishes that cannot be read, see `unended`."""
        wishes = iter(self._root.read_all([_path(one.id, CANCEL) for one in records if not one.ended]))
        for record in records:
            try:
                yield record if record.ended else as_asked(record, _asked_at(next(wishes), record.id))
            except StoreError as error:
                if on_damaged is None:
                    raise
                on_damaged(error)

    def _has_ended(self, batch_id: str) -> bool:
        """Whether it is over, though killed between its end and its mark; one without a record is being made."""
        record = self.read(batch_id)
        return record is not None and record.ended

    def _listed(self, ids: Sequence[str], tenant: str) -> Iterable[BatchRecord]:
        found = self._root.read_all([_path(one, RECORD) for one in ids])
        records = [_record(data, batch_id) for batch_id, data in zip(ids, found, strict=True)]
        return self.as_asked([one for one in records if one is not None and one.tenant == tenant])


def _path(batch_id: str, name: str) -> str:
    return f"{FOLDER}/{batch_id}/{name}"


def _mark(batch_id: str) -> str:
    return f"{OPEN}/{batch_id}"


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
