"""The files of a ledger that grow: results of rows that are done, and tokens of rows that are not.

Both consist of frames, so that a torn write is seen and left out. A frame is 4 bytes of length (little-endian), 8
bytes of BLAKE2b over length and payload, and the payload.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from cluster.batch.errors import LedgerError
from cluster.batch.ledger.records import NewTokens, RowDone, decode_done, decode_tokens, encode
from cluster.private_files import FILE
from engine.report import TokenLogprob

LENGTH_BYTES = 4
CHECKSUM_BYTES = 8
HEAD_BYTES = LENGTH_BYTES + CHECKSUM_BYTES
MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 1 << 20
COMPACT_FROM = 4 << 20  # bytes: smaller files are not worth it
COMPACT_FACTOR = 4  # times the size after the last time
ENTRY_BYTES = 8
OFFSET_BITS = 48
ENTRIES_PER_READ = 8192


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame. start, end: where it lies in its file, in bytes."""

    start: int
    end: int
    payload: bytes


def framed(payload: bytes) -> bytes:
    """Return `payload` as a frame."""
    length = len(payload).to_bytes(LENGTH_BYTES, "little")
    return length + _checksum(length, payload) + payload


class FrameWriter:
    """Appends frames to a new file. What was written outlives this process at once, and the machine after `sync`.

    Raises `LedgerError` where a write fails (a full disk): the file then ends in part of a frame, which readers leave
    out, and the writer takes no more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._dirty = False
        self._broken: OSError | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, FILE)
        except OSError as error:
            raise _failed(path, error) from error

    def append(self, payloads: list[bytes]) -> list[int]:
        """Write frames in one go, and return where each starts."""
        starts, data = [], bytearray()
        for payload in payloads:
            starts.append(self.size + len(data))
            data += framed(payload)
        self._write(bytes(data))
        return starts

    def sync(self) -> None:
        """Return when everything that was written is on the disk. May run in a thread beside `append`."""
        if self._dirty:
            self._dirty = False
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise _failed(self.path, error) from error

    def close(self) -> None:
        """Let go of the file. Can be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Let go of the file, and remove it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        if self._broken is not None:
            raise _failed(self.path, self._broken) from self._broken
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._broken = error
            raise _failed(self.path, error) from error
        self.size += len(data)
        self._dirty = True


def read_frames(path: Path, limit: int | None = None) -> Iterator[Frame]:
    """Yield the whole frames of a file, up to byte `limit`; ends quietly where a frame is torn or damaged.

    Raises `LedgerError` when the file cannot be read.
    """
    try:
        with path.open("rb", READ_BYTES) as file:
            yield from _frames(file, limit)
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}") from error


def read_payload(file: BinaryIO, start: int) -> bytes:
    """Return the payload of the frame at `start`. Raises `LedgerError` when there is no whole frame."""
    file.seek(start)
    frame = next(_frames(file, None), None)
    if frame is None:
        raise LedgerError(f"{file.name}: the frame at byte {start} is damaged; run the batch anew without it")
    return frame.payload


def _frames(file: BinaryIO, limit: int | None) -> Iterator[Frame]:
    start = file.tell()
    while len(head := file.read(HEAD_BYTES)) == HEAD_BYTES:
        length = int.from_bytes(head[:LENGTH_BYTES], "little")
        end = start + HEAD_BYTES + length
        if length > MAX_FRAME_BYTES or (limit is not None and end > limit):
            return
        payload = file.read(length)
        if len(payload) < length or _checksum(head[:LENGTH_BYTES], payload) != head[LENGTH_BYTES:]:
            return
        yield Frame(start, end, payload)
        start = end


def _checksum(length: bytes, payload: bytes) -> bytes:
    return blake2b(length + payload, digest_size=CHECKSUM_BYTES).digest()


def _failed(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"{path} cannot be written ({error.strerror}); make room there and run the same command with --resume: what "
        "was done so far is kept"
    )


@dataclass(slots=True)
class ChoiceTokens:
    """Output tokens of a choice, why it ended, if it did, and a log-probability for each token, if it wants them."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, new: NewTokens) -> None:
        """Take in what came."""
        self.tokens += new.tokens
        self.logprobs += new.logprobs
        self.finish = new.finish


Partial = dict[int, ChoiceTokens]  # choice -> its tokens


class TokenFile:
    """The partial rows of one epoch, in memory and on disk.

    found: the partial rows of the epochs before. The file is `tokens-EPOCH-N.log` with the highest N.
    """

    def __init__(self, folder: Path, epoch: int, found: Mapping[int, Partial]) -> None:
        self.partial: dict[int, Partial] = dict(found)
        self._folder = folder
        self._epoch = epoch
        self._generation = 0
        self._pending: list[bytes] = []
        self._in_place = threading.Lock()  # the file, while it is synced
        self._file = self._written()
        self._compact_at = self._next_compaction()

    def note(self, new: NewTokens) -> None:
        """Take in new tokens; `flush` writes them."""
        choice = self.partial.setdefault(new.row, {}).setdefault(new.choice, ChoiceTokens())
        choice.add(new)
        self._pending.append(encode(new))

    def forget(self, row: int) -> None:
        """The row is done, or begins anew: its tokens are of no use."""
        self.partial.pop(row, None)

    def forget_all(self) -> None:
        """All rows begin anew, also for readers of the file. Raises `LedgerError`."""
        self.partial.clear()
        self._pending.clear()
        self._compact()

    def flush(self) -> None:
        """Write what was noted. Raises `LedgerError`."""
        if self._pending:
            pending, self._pending = self._pending, []
            self._file.append(pending)
        if self._file.size > self._compact_at:
            self._compact()

    def sync(self) -> None:
        """Return when all that was written is on the disk. May run in a thread beside the others."""
        with self._in_place:
            self._file.sync()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def discard(self) -> None:
        """Let go of the file, and remove it."""
        self._file.discard()

    def _compact(self) -> None:
        old, new = self._file, self._written()
        with self._in_place:
            self._file = new
            old.close()
        self._compact_at = self._next_compaction()
        old.path.unlink()

    def _next_compaction(self) -> int:
        return max(COMPACT_FROM, COMPACT_FACTOR * self._file.size)

    def _written(self) -> FrameWriter:
        """Return a new file that holds the partial rows. It has its name only once it is whole, and on the disk."""
        self._generation += 1
        path = self._folder / f"tokens-{self._epoch:08}-{self._generation:08}.log"
        draft = path.with_suffix(".draft")
        with ExitStack() as undo:
            file = FrameWriter(draft)
            undo.callback(file.discard)
            file.append([encode(one) for one in _all_tokens(self.partial)])
            file.sync()
            file.path = draft.rename(path)
            undo.pop_all()
        return file


def _all_tokens(partial: Mapping[int, Partial]) -> Iterable[NewTokens]:
    for row, choices in partial.items():
        for number, choice in choices.items():
            yield NewTokens(row, number, 0, tuple(choice.tokens), choice.finish, tuple(choice.logprobs))


def read_partial(folder: Path, epoch: int) -> dict[int, Partial]:
    """Return the partial rows that an epoch left, rows that are done meanwhile included."""
    paths = sorted(folder.glob(f"tokens-{epoch:08}-*.log"))
    found: dict[int, Partial] = {}
    for frame in read_frames(paths[-1]) if paths else ():
        one = decode_tokens(frame.payload)
        choices = found.setdefault(one.row, {})
        if one.start == 0:  # begun anew
            choices[one.choice] = ChoiceTokens()
        choices.setdefault(one.choice, ChoiceTokens()).add(one)
    return found


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
