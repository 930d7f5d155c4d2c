"""The ledger of one batch: a folder beside its output, written by one driver at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from heapq import nsmallest
from operator import attrgetter
from pathlib import Path

import msgspec

from cluster.batch.errors import LedgerError
from cluster.batch.ledger.epoch import JOB_FILE, LEASE, REPLICAS_FILE, Epoch, begin_anew, refuse_foreign
from cluster.batch.ledger.records import Job, NewTokens, Parts, RowDone, difference, encode
from cluster.batch.ledger.row_files import (
    DoneRows,
    FrameWriter,
    Partial,
    TokenFile,
    in_input_order,
    read_done,
    read_partial,
)
from cluster.private_files import close_to_others, make_folder, opener
from engine.loader.fingerprint import weights_of

FIRST_ERRORS = 3


class Ledger:
    """Open it with `Ledger.open`; close it whatever happens. Not thread-safe, but for `sync`.

    job: of the first run. done: rows that are finished. totals: what the finished rows took. replicas: the
    fingerprint of those that may draw tokens, None before that is agreed on.
    """

    def __init__(self, folder: Path, job: Job, epoch: Epoch) -> None:
        self.job = job
        self.done = DoneRows(job.rows)
        self.totals = Totals()
        self._folder = folder
        self._epoch = epoch
        self.replicas = read_replicas(folder)
        self._parts, partial = self._recovered()
        self._pending: list[RowDone] = []
        with ExitStack() as undo:
            self._tokens = TokenFile(folder, epoch.number, partial)
            undo.callback(self._tokens.discard)
            self._rows = FrameWriter(folder / f"rows-{epoch.number:08}.log")
            undo.callback(self._rows.discard)
            # Last: until this is there, those who come later go by the epoch before.
            _write_whole(_parts_path(folder, epoch.number), msgspec.json.encode(Parts(self._parts)))
            undo.pop_all()

    @classmethod
    def open(cls, folder: Path, job: Job, resume: bool, lease: float = LEASE) -> Ledger:
        """Begin, or go on where an earlier driver of the same job ended.

        Signs of life come from a thread until it is closed: however long reading it or anything later takes, no
        driver on another host takes this one for dead. Raises `LedgerError` naming what differs when the folder
        belongs to another job, or when it holds a job and `resume` is not set, or things that are of no ledger, and
        `BusyError` when another driver is at work on it.
        """
        try:
            make_folder(folder)
        except OSError as error:
            raise LedgerError(f"{folder} cannot be made: {error.strerror}; name another with --ledger") from error
        refuse_foreign(folder)
        close_to_others(folder)  # it holds nothing but a ledger
        epoch = Epoch(folder, lease)
        epoch.keep_beating()
        return cls.within(epoch, job, resume)

    @classmethod
    def within(cls, epoch: Epoch, job: Job, resume: bool = True) -> Ledger:
        """Like `open`, in an epoch that was begun already; the ledger lets go of it when it is closed."""
        with ExitStack() as undo:
            undo.callback(epoch.close)
            try:
                ledger = cls(epoch.folder, _agreed(epoch, job, resume), epoch)
            except (OSError, msgspec.MsgspecError) as error:
                raise LedgerError(f"{epoch.folder} cannot be used: {error}") from error
            undo.pop_all()
        return ledger

    def agree_on(self, fingerprint: str) -> None:
        """Keep to what replicas compute with from now on.

        Where earlier drivers' replicas computed the same weights otherwise (another version, library or device), what
        is done stays, and rows in the middle of an answer begin anew: none is of two kinds. Raises `LedgerError` when
        they had another model.
        """
        if self.replicas == fingerprint:
            return
        if self.replicas is not None:
            if weights_of(self.replicas) != weights_of(fingerprint):
                raise LedgerError(
                    f"{self._folder} is of another model than the replicas run now: weights, dtype or quantization "
                    "are not what they were; use those of the first run, or delete it to begin anew"
                )
            self._tokens.forget_all()
        _write_whole(self._folder / REPLICAS_FILE, fingerprint.encode())
        self.replicas = fingerprint

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self._folder

    @property
    def partial(self) -> Mapping[int, Partial]:
        """Rows that are not done, of which tokens are known."""
        return self._tokens.partial

    def note_tokens(self, new: NewTokens) -> None:
        """Take in new tokens of a row; `flush` writes them."""
        self._tokens.note(new)

    def forget_tokens(self, row: int) -> None:
        """The row begins anew."""
        self._tokens.forget(row)

    def note_done(self, done: RowDone) -> None:
        """Take in a result, the one of its row; `flush` writes it."""
        if not self.done.add(done.row):
            raise LedgerError(f"row {done.row} is done twice")
        self.totals.add(done)
        self._pending.append(done)
        self._tokens.forget(done.row)

    def flush(self) -> None:
        """Write what was noted: it outlives this process. Raises `FencedError`, or `LedgerError` (a full disk)."""
        self._epoch.check()
        self._tokens.flush()
        if self._pending:
            pending, self._pending = self._pending, []
            self._rows.append([encode(done) for done in pending])

    def sync(self) -> None:
        """Return when all that was written is on the disk; show a sign of life. May run in a thread."""
        self._epoch.beat()
        self._rows.sync()
        self._tokens.sync()

    def results(self) -> Iterator[RowDone]:
        """Yield the result of every row in the order of the input. Raises `LedgerError` when one is missing."""
        self.flush()
        self._epoch.check()
        parts = [*self._parts.items(), (self._rows.path.name, self._rows.size)]
        where = [(self._folder / name, length) for name, length in parts]
        return in_input_order(where, self.job.rows, self._folder / f"order-{self._epoch.number:08}")

    def check(self) -> None:
        """Raise `FencedError` when another driver has taken over."""
        self._epoch.check()

    def close(self) -> None:
        """Let go; what was written stays. Can be called twice."""
        self._rows.close()
        self._tokens.close()
        self._epoch.close()

    def remove(self) -> None:
        """Close, and remove it: the output is in place. Raises `LedgerError`."""
        self._rows.close()
        self._tokens.close()
        self._epoch.remove_folder()

    def _recovered(self) -> tuple[dict[str, int], dict[int, Partial]]:
        """Return the files of results of the epochs before, with their lengths, and the partial rows."""
        before = max((_number(path) for path in self._folder.glob("parts-*.json")), default=0)
        if not before:
            return {}, {}
        parts = msgspec.json.decode(_parts_path(self._folder, before).read_bytes(), type=Parts).rows
        limits: dict[str, int | None] = {**parts, f"rows-{before:08}.log": None}
        found: dict[str, int] = {}
        for name, limit in limits.items():
            if (self._folder / name).exists():
                found[name] = self._take_in(self._folder / name, limit)
        partial = read_partial(self._folder, before)
        return found, {row: choices for row, choices in partial.items() if row not in self.done}

    def _take_in(self, path: Path, limit: int | None) -> int:
        """Note the results of a file as done; return how many of its bytes count."""
        length = 0
        for _, end, done in read_done(path, limit):
            length = end
            if self.done.add(done.row):
                self.totals.add(done)
        return length


class Totals:
    """Sums over finished rows. errors: code -> rows. first_errors: of the input's first rows with one, in order."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.errors: dict[str, int] = {}
        self.first_errors: list[RowDone] = []

    @property
    def num_errors(self) -> int:
        """Rows that ended in an error."""
        return sum(self.errors.values())

    def add(self, done: RowDone) -> None:
        """Count a row."""
        self.prompt_tokens += done.prompt_tokens
        self.output_tokens += done.output_tokens
        if done.code:
            self.errors[done.code] = self.errors.get(done.code, 0) + 1
            self.first_errors = nsmallest(FIRST_ERRORS, [*self.first_errors, done], key=attrgetter("row"))


def remove_left(folder: Path, job: Job) -> None:
    """Remove what a finished `job` has left of its ledger: it was killed before all was gone.

    Raises `LedgerError` when the ledger is another job's, and `BusyError` when another driver is at work on it.
    """
    if not folder.exists():
        return
    refuse_foreign(folder)
    with closing(Epoch(folder)) as epoch:
        if (folder / JOB_FILE).exists():
            _agreed(epoch, job, resume=True)
        epoch.remove_folder()


def _agreed(epoch: Epoch, job: Job, resume: bool) -> Job:
    """Return the job of the folder, which is `job` if there was none. Raises `LedgerError` when they differ."""
    folder = epoch.folder
    path = folder / JOB_FILE
    try:
        first = msgspec.json.decode(path.read_bytes(), type=Job)
    except FileNotFoundError:
        epoch.check()
        begin_anew(folder)
        _write_whole(path, msgspec.json.encode(job))
        return job
    except (OSError, msgspec.MsgspecError) as error:
        raise LedgerError(f"{path} cannot be read ({error}); delete {folder} to begin anew") from error
    if not resume:
        raise LedgerError(
            f"{folder} holds a run of this output that did not end; go on with --resume, or delete it to begin anew"
        )
    if (told := difference(first, job)) is not None:
        raise LedgerError(
            f"{folder} is of another job: {told}; use what the first run used, or delete {folder} to begin anew"
        )
    return first


def read_replicas(folder: Path) -> str | None:
    """Return the fingerprint that a ledger in `folder` agreed on, None if it did not yet."""
    try:
        return (folder / REPLICAS_FILE).read_text(encoding="ascii")
    except FileNotFoundError:
        return None


def _parts_path(folder: Path, epoch: int) -> Path:
    return folder / f"parts-{epoch:08}.json"


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _write_whole(path: Path, data: bytes) -> None:
    """Put a file in place that is either there and whole, or not there. Raises `LedgerError`."""
    draft = path.with_suffix(".draft")
    try:
        with open(draft, "wb", opener=opener) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise LedgerError(f"{path} cannot be written: {error.strerror}") from error
