"""The pass over an input before any work: how many rows, which, and whether their ids are distinct."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from cluster.batch.errors import InputError, RowFault, RowFaultsError, UnreachableError
from cluster.batch.io.source import FileSource
from cluster.batch.row_tasks import TaskMaker
from cluster.batch.rows import InputSource, SourceRow, quoted
from cluster.private_files import make_folder

SHOWN = 10
LENGTH_BYTES = 8
PARTITIONS = 256
HASH_BYTES = 16
# The hash of an id in two parts, and the number of its row.
ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<u8")])
ENTRIES_PER_SPILL = 1 << 14
ENTRIES_PER_READ = 1 << 17


@dataclass(frozen=True, slots=True)
class Checked:
    """What an input holds. digest: over the bytes of all rows, in order. unreadable: rows with a problem."""

    rows: int
    digest: str
    unreadable: int


def check_input(source: FileSource, tasks: TaskMaker, folder: Path, reserved: Collection[str] = ()) -> Checked:
    """Read all rows once, and return what they are.

    folder: for files of ids while this runs, so that memory stays the same whatever the number of rows. reserved:
    columns that the output will add, which no row may have. Raises `InputError` when there are no rows,
    `RowFaultsError` with the first ten rows that have no id, that of another row, or a column that is reserved, and
    `UnreachableError` when the input cannot be read, or `folder` not written.
    """
    checking = _Checking(tasks, folder, frozenset(reserved))
    try:
        for row in source.rows():
            checking.take(row)
        checking.finish(source)
    finally:
        checking.close()
    return Checked(checking.rows, checking.digest.hexdigest(), checking.unreadable)


class _Checking:
    """One such pass. faults: row -> what is wrong with it, of the first rows with a fault."""

    def __init__(self, tasks: TaskMaker, folder: Path, reserved: frozenset[str]) -> None:
        self.rows = 0
        self.unreadable = 0
        self.digest = blake2b(digest_size=32)
        self._tasks = tasks
        self._reserved = reserved
        self._ids = _Ids(folder) if tasks.has_ids else None
        self._faults: dict[int, RowFault] = {}
        self._num_faults = 0

    def take(self, row: SourceRow) -> None:
        """Take in the next row."""
        self.rows += 1
        self.unreadable += row.fields is None
        self.digest.update(len(row.raw).to_bytes(LENGTH_BYTES, "little"))
        self.digest.update(row.raw)
        if self._reserved and row.fields and not self._reserved.isdisjoint(row.fields):
            name = next(name for name in row.fields if name in self._reserved)
            self._fault(row, f"{row.place} has a column {name!r}, which the output adds: choose another name for it")
        if self._ids is not None:
            self._take_id(self._ids, row)

    def finish(self, source: FileSource) -> None:
        """Raise `InputError` when the rows cannot be used."""
        if not self.rows:
            raise InputError(f"the input has no rows: there is none in {source.named}")
        repeated = self._ids.repeated() if self._ids is not None else _Repeated({}, 0)
        self._num_faults += repeated.count
        self._faults.update(self._named(source, repeated.pairs))
        if not self._faults:
            return
        shown = [self._faults[row] for row in sorted(self._faults)[:SHOWN]]
        raise RowFaultsError(shown, self._num_faults - len(shown))

    def close(self) -> None:
        """Remove the files of ids."""
        if self._ids is not None:
            self._ids.close()

    def _take_id(self, ids: _Ids, row: SourceRow) -> None:
        custom_id = self._tasks.custom_id(row)
        if custom_id is not None:
            if row.fields is not None:  # an id made of a row's number is not the user's
                ids.add(custom_id, row.number)
        elif row.fields is None:
            self._fault(row, f"{row.place} has no custom_id: {row.problem}")
        else:
            self._fault(row, f"{row.place} {self._tasks.without_id(row)}")

    def _fault(self, row: SourceRow, text: str) -> None:
        self._num_faults += 1
        if len(self._faults) < SHOWN:
            self._faults.setdefault(row.number, RowFault(text, row.line))

    def _named(self, source: InputSource, pairs: dict[int, int]) -> dict[int, RowFault]:
        """Return what to say of rows whose id an earlier row has. pairs: row -> that row."""
        wanted = {*pairs, *pairs.values()}
        found: dict[int, tuple[str, int | None, str]] = {}  # row -> place, line, id
        for row in source.rows() if wanted else ():
            if row.number in wanted:
                found[row.number] = row.place, row.line, quoted(self._tasks.custom_id(row))
                if len(found) == len(wanted):
                    break
        return {later: _twice(*found[later], found[earlier][0]) for later, earlier in pairs.items()}


@dataclass(frozen=True, slots=True)
class _Repeated:
    """pairs: row -> the first row with its id, of the first rows. count: of all such rows."""

    pairs: dict[int, int]
    count: int


class _Ids:
    """Hashes of ids in files, split by hash: rows with one id are in one file, and a file fits into memory."""

    def __init__(self, folder: Path) -> None:
        # One of its own: what a run that was killed left behind must not be taken for ids of this one.
        try:
            make_folder(folder)
            self._folder = tempfile.TemporaryDirectory(dir=folder, prefix="ids-")
        except OSError as error:
            raise _not_written(folder, error) from error
        self._entries = np.empty(ENTRIES_PER_SPILL, ENTRY)
        self._filled = 0

    def add(self, custom_id: str, row: int) -> None:
        """Note the id of a row."""
        digest = blake2b(custom_id.encode(), digest_size=HASH_BYTES).digest()
        high, low = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        self._entries[self._filled] = (high, low, row)
        self._filled += 1
        if self._filled == ENTRIES_PER_SPILL:
            self._spill()

    def repeated(self) -> _Repeated:
        """Return the rows whose id an earlier row has."""
        self._spill()
        count = 0
        first: list[tuple[int, int]] = []
        for part in range(PARTITIONS):
            for pairs in self._repeated_in(part):
                count += len(pairs)
                found = ((int(later), int(earlier)) for later, earlier in pairs[:SHOWN])
                first = heapq.nsmallest(SHOWN, [*first, *found])
        return _Repeated(dict(first), count)

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()

    def _path(self, part: int) -> Path:
        return Path(self._folder.name) / f"{part:03}"

    def _spill(self) -> None:
        entries = self._entries[: self._filled]
        self._filled = 0
        parts = entries["high"] % PARTITIONS
        order = np.argsort(parts, kind="stable")
        bounds = np.searchsorted(parts[order], np.arange(PARTITIONS + 1))
        try:
            for part, of_part in _slices(entries[order], bounds):
                with self._path(part).open("ab") as file:
                    file.write(of_part.tobytes())
        except OSError as error:
            raise _not_written(Path(self._folder.name), error) from error

    def _repeated_in(self, part: int) -> Iterator[np.ndarray]:
        """Yield (row, first row with its id) of one file: [num_repeated, 2]. Few ids often take few bytes."""
        path = self._path(part)
        if not path.exists():
            return
        known = np.empty(0, ENTRY)
        with path.open("rb") as file:
            while len(entries := np.frombuffer(file.read(ENTRY.itemsize * ENTRIES_PER_READ), ENTRY)):
                known, pairs = _merged(np.concatenate((known, entries)))
                yield pairs


def _twice(place: str, line: int | None, custom_id: str, earlier: str) -> RowFault:
    return RowFault(f"custom_id {custom_id} at {place} is used at {earlier} already", line)


def _merged(entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first entry of each id, and (row, row of that entry) of the others, by row."""
    entries = entries[np.lexsort((entries["row"], entries["low"], entries["high"]))]
    repeats = np.zeros(len(entries), bool)
    repeats[1:] = (entries["high"][1:] == entries["high"][:-1]) & (entries["low"][1:] == entries["low"][:-1])
    firsts = np.maximum.accumulate(np.where(repeats, 0, np.arange(len(entries))))
    pairs = np.stack((entries["row"][repeats], entries["row"][firsts][repeats]), axis=1)
    return entries[~repeats], pairs[np.argsort(pairs[:, 0])]


def _slices(entries: np.ndarray, bounds: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for part in range(PARTITIONS):
        start, end = bounds[part], bounds[part + 1]
        if start < end:
            yield part, entries[start:end]


def _not_written(folder: Path, error: OSError) -> UnreachableError:
    return UnreachableError(f"ids cannot be noted in {folder} ({error.strerror}); make room there")
