"""Tokens of rows that are not done yet: a file that is written anew, with the live rows alone, when it has grown."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cluster.batch.ledger.frame_file import FrameWriter, read_frames
from cluster.batch.ledger.records import Progress, decode_progress, encode
from engine.report import TokenLogprob

COMPACT_FROM = 4 << 20  # bytes: smaller files are not worth it
COMPACT_FACTOR = 4  # times the size after the last time


@dataclass(slots=True)
class ChoiceTokens:
    """Output tokens of a choice, why it ended, if it did, and a log-probability for each token, if it wants them."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, progress: Progress) -> None:
        """Take in what came."""
        self.tokens += progress.tokens
        self.logprobs += progress.logprobs
        self.finish = progress.finish


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

    def note(self, progress: Progress) -> None:
        """Take in new tokens; `flush` writes them."""
        choice = self.partial.setdefault(progress.row, {}).setdefault(progress.choice, ChoiceTokens())
        choice.add(progress)
        self._pending.append(encode(progress))

    def forget(self, row: int) -> None:
        """The row is done, or begins anew: its tokens are of no use."""
        self.partial.pop(row, None)

    def forget_all(self) -> None:
        """All rows begin anew, for whoever reads the file too. Raises `LedgerError`."""
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
            file.append([encode(one) for one in _progress(self.partial)])
            file.sync()
            file.path = draft.rename(path)
            undo.pop_all()
        return file


def _progress(partial: Mapping[int, Partial]) -> Iterable[Progress]:
    for row, choices in partial.items():
        for number, choice in choices.items():
            yield Progress(row, number, 0, tuple(choice.tokens), choice.finish, tuple(choice.logprobs))


def read_partial(folder: Path, epoch: int) -> dict[int, Partial]:
    """Return the partial rows that an epoch left, rows that are done meanwhile included."""
    paths = sorted(folder.glob(f"tokens-{epoch:08}-*.log"))
    found: dict[int, Partial] = {}
    for frame in read_frames(paths[-1]) if paths else ():
        one = decode_progress(frame.payload)
        choices = found.setdefault(one.row, {})
        if one.start == 0:  # begun anew
            choices[one.choice] = ChoiceTokens()
        choices.setdefault(one.choice, ChoiceTokens()).add(one)
    return found
