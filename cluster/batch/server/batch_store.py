"""Batches by id. A batch is a chain of states, each kept once and for ever; the last one is what it is.

`batches/ID/batch.json`: a state, and how far it is; what readers begin with. At first the state with the number 0.
`batches/ID/state-N.json`: the state with a higher number, which one process alone can have put there (`Root.create`).
A change of a batch names the state that it follows, and is refused where another follows that already: so no end is
ever left, and a runner that was taken for dead changes nothing any more, whenever it wakes.
`open/ID`: its mark while it has not ended, so that listing open batches reads no ended ones. It holds the id of the
input and is there before the batch, which is written once it is certain that the input stays: a batch that is taken
back never was one to any runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from cluster.batch.errors import FencedError, StoreError
from cluster.batch.server.file_store import META, file_folder
from cluster.batch.server.ids import BATCH_IDS, READ_AT_ONCE, Page, PageQuery, output_ids, page_of
from cluster.batch.server.objects import AFTER, BatchRecord, LineError
from cluster.batch.server.root import Root

FOLDER = "batches"
OPEN = "open"
RECORD = "batch.json"
# Seconds after which a mark without a record is that of a process that was killed between the two.
STALE = 3600


OnDamaged = Callable[[StoreError], None]
Change = Callable[[BatchRecord], BatchRecord]


class BatchStore:
    """All methods block, and raise `OSError`."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._unmade: dict[str, float] = {}  # marks without a batch, and since when they are seen so

    def announce(self, batch_id: str, input_file_id: str) -> None:
        """Mark a batch that is about to be created, so that its input stays. Of a killed process it is gone later."""
        self._root.write(_mark(batch_id), input_file_id.encode())

    def drop(self, batch_id: str) -> None:
        """Take the mark back of a batch that was not created."""
        self._root.remove(_mark(batch_id))

    def write(self, record: BatchRecord) -> BatchRecord:
        """Keep `record` as the state after the one that it was made of, whose number it has; return it.

        Raises `FencedError` where another state follows that one.
        """
        after = replace(record, number=record.number + 1)
        data = msgspec.json.encode(after)
        if not self._root.create(_state(after.id, after.number), data):
            raise FencedError(f"batch {record.id} was changed by another process meanwhile")
        self.note(after)
        if after.ended:
            self._leave(after)
        return after

    def change(self, record: BatchRecord, to: Change) -> BatchRecord:
        """Keep what `to` makes of a batch, for the runner that knows it as `record`; return it.

        `to` may be called again, with what became of the batch meanwhile, such as that it is to be cancelled. Raises
        `FencedError` where another runner took or ended it.
        """
        while True:
            after = to(record)
            if after is record:
                return record
            try:
                return self.write(after)
            except FencedError:
                record = self.follow(record)

    def follow(self, record: BatchRecord) -> BatchRecord:
        """Return what became of a batch that its runner knows as `record`; raises `FencedError` as `change` does."""
        latest = self._followed({record.id: record})[record.id] or record
        if latest.number != record.number and (latest.ended or latest.runner != record.runner):
            raise FencedError(f"batch {record.id} was taken over, or ended, by another runner")
        return latest

    def note(self, record: BatchRecord) -> None:
        """Keep a new batch, which was announced, or show readers how far one is; its state is that of its chain."""
        self._root.write(_path(record.id, RECORD), msgspec.json.encode(record))

    def read(self, batch_id: str) -> BatchRecord | None:
        """Return a batch of any tenant. batch_id: one of ours."""
        return self._read_all([batch_id]).get(batch_id)

    def get(self, batch_id: str, tenant: str) -> BatchRecord | None:
        """Return a tenant's batch, None where it has none of this id, however that is spelt."""
        record = self.read(batch_id) if BATCH_IDS.fits(batch_id) else None
        return record if record is not None and record.tenant == tenant else None

    def page(self, tenant: str, asked: PageQuery) -> Page[BatchRecord]:
        """Return a page of a tenant's batches."""
        ids = [one for one in self._root.names(FOLDER) if BATCH_IDS.may_be_of(one, tenant)]
        return page_of(ids, asked, lambda some: self._listed(some, tenant))

    def ask_cancel(self, batch_id: str, now: int, why: LineError | None = None) -> None:
        """Have a batch cancelled, unless it has ended or is to be cancelled already. why: None = its client asks."""
        while (record := self.read(batch_id)) is not None and "cancelling" in AFTER[record.status]:
            with suppress(FencedError):  # it was changed meanwhile: looked at again
                self.write(record.cancelling(now, why))

    def unended(self, on_damaged: OnDamaged | None = None) -> Iterator[BatchRecord]:
        """Yield the batches that have not ended, the oldest first.

        on_damaged: told of records that cannot be read, which are left out; None = they are raised. Marks that stand
        for nothing are removed on the way.
        """
        marked = sorted(one for one in self._root.names(OPEN) if BATCH_IDS.fits(one))
        self._unmade = {one: since for one, since in self._unmade.items() if one in set(marked)}
        for start in range(0, len(marked), READ_AT_ONCE):
            ids = marked[start : start + READ_AT_ONCE]
            found = self._read_all(ids, on_damaged)
            for batch_id in ids:
                record = found.get(batch_id)
                if record is not None and not record.ended:
                    yield record
                elif record is not None:
                    self._leave(record)  # killed between its end and its mark
                elif batch_id not in found and self._is_stale(batch_id):
                    self._root.remove(_mark(batch_id))

    def num_open(self, tenant: str) -> int:
        """Return how many batches of a tenant have not ended, by their marks."""
        return sum([BATCH_IDS.may_be_of(one, tenant) for one in self._root.names(OPEN)])

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

    def _has_ended(self, batch_id: str) -> bool:
        """Whether it is over, though killed between its end and its mark; one without a record is being made."""
        record = self.read(batch_id)
        return record is not None and record.ended

    def _is_stale(self, batch_id: str) -> bool:
        """By this process's own clock: a time of day that jumps would take the mark of a batch that is being made."""
        now = time.monotonic()
        return now - self._unmade.setdefault(batch_id, now) > STALE

    def _listed(self, ids: Sequence[str], tenant: str) -> Iterable[BatchRecord]:
        records = self._read_all(ids).values()
        return [one for one in records if one is not None and one.tenant == tenant]

    def _read_all(self, ids: Sequence[str], on_damaged: OnDamaged | None = None) -> dict[str, BatchRecord | None]:
        """Return the batches that are there as they are, in their order; None = damaged, see `unended`."""
        return self._followed(self._kept({one: _path(one, RECORD) for one in ids}, on_damaged), on_damaged)

    def _followed(
        self, found: Mapping[str, BatchRecord | None], on_damaged: OnDamaged | None = None
    ) -> dict[str, BatchRecord | None]:
        """Return how the chains of batches end, of each of which a state was found."""
        latest = dict(found)
        while left := {one.id: _state(one.id, one.number + 1) for one in found.values() if one and not one.ended}:
            found = self._kept(left, on_damaged)
            latest |= found
        return latest

    def _kept(self, paths: Mapping[str, str], on_damaged: OnDamaged | None) -> dict[str, BatchRecord | None]:
        """Return the states at `paths`, by batch, that are there; None = damaged."""
        found: dict[str, BatchRecord | None] = {}
        for (batch_id, path), data in zip(paths.items(), self._root.read_all(list(paths.values())), strict=True):
            if data is None:
                continue
            try:
                found[batch_id] = msgspec.json.decode(data, type=BatchRecord)
            except msgspec.MsgspecError as error:
                damaged = StoreError(f"{path} is damaged ({error})")
                if on_damaged is None:
                    raise damaged from error
                on_damaged(damaged)
                found[batch_id] = None
        return found

    def _leave(self, ended: BatchRecord) -> None:
        """Remove what attempts to end a batch have left, and then its mark."""
        kept = {one.id: {META, one.stored_as} for one in (ended.outcome.files if ended.outcome else ())}
        for file_id in output_ids(ended.id):
            folder = file_folder(file_id)
            if file_id not in ended.file_ids:
                self._root.remove(folder)
                continue
            for name in self._root.names(folder):
                if name not in kept.get(file_id, {name}):
                    self._root.remove(f"{folder}/{name}")
        self._root.remove(_mark(ended.id))


def _path(batch_id: str, name: str) -> str:
    return f"{FOLDER}/{batch_id}/{name}"


def _state(batch_id: str, number: int) -> str:
    return _path(batch_id, f"state-{number}.json")


def _mark(batch_id: str) -> str:
    return f"{OPEN}/{batch_id}"
