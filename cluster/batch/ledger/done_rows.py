"""Which rows are done, a bit each, and where their results lie."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from cluster.batch.errors import LedgerError
from cluster.batch.ledger.frame_file import read_frames, read_payload
from cluster.batch.ledger.records import RowDone, decode_done
from cluster.private_files import FILE

ENTRY_BYTES = 8
OFFSET_BITS = 48
ENTRIES_PER_READ = 8192


class DoneRows:
    """A set of row numbers below `rows`; 125 kB for a million."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.count = 0
        self._bits = bytearray((rows + 7) // 8)

    def __contains__(self, row: int) -> bool:
        return bool(self._bits[row >> 3] & (1 << (row & 7)))

    def add(self, row: int) -> bool:
        """Return False if the row is in already."""
        if row in self:
            return False
        self._bits[row >> 3] |= 1 << (row & 7)
        self.count += 1
        return True


def read_done(path: Path, limit: int | None) -> Iterator[tuple[int, int, RowDone]]:
    """Yield (start, end, row) of each result in a file, up to byte `limit`."""
    for frame in read_frames(path, limit):
        yield frame.start, frame.end, decode_done(frame.payload)


def in_input_order(parts: Sequence[tuple[Path, int | None]], rows: int, index: Path) -> Iterator[RowDone]:
    """Yield the result of every row, by its place in the input; a row that is there twice is taken as it came first.

    parts: files of results and how many of their bytes count. index: a file for the order, made anew; so memory stays
    the same whatever the number of rows. Raises `LedgerError` when a row is missing.
    """
    _write_index(parts, rows, index)
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path, _ in parts]
        order = stack.enter_context(index.open("rb"))
        row = 0
        while entries := order.read(ENTRY_BYTES * ENTRIES_PER_READ):
            for at in range(0, len(entries), ENTRY_BYTES):
                entry = int.from_bytes(entries[at : at + ENTRY_BYTES], "little")
                if not entry:
                    raise LedgerError(f"{index.parent}: row {row} has no result; run this again with --resume")
                where = (entry >> OFFSET_BITS) - 1
                yield decode_done(read_payload(files[where], entry & ((1 << OFFSET_BITS) - 1)))
                row += 1
    index.unlink()


def _write_index(parts: Sequence[tuple[Path, int | None]], rows: int, index: Path) -> None:
    seen = DoneRows(rows)
    try:
        fd = os.open(index, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE)
        try:
            os.ftruncate(fd, rows * ENTRY_BYTES)
            for number, (path, limit) in enumerate(parts, start=1):
                for start, _, done in read_done(path, limit):
                    if seen.add(done.row):
                        entry = (number << OFFSET_BITS | start).to_bytes(ENTRY_BYTES, "little")
                        os.pwrite(fd, entry, done.row * ENTRY_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise LedgerError(f"{index} cannot be written: {error.strerror}") from error
