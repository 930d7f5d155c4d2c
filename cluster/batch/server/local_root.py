"""A directory of this machine, or one that several share. What is in place is on the disk, and its owner's alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from cluster.private_files import close_to_others, make_folder, make_folders, opener

DRAFTS = "drafts"
# All folders that a server has in it, which earlier versions made open to all.
OURS = ("batches", "deleting", DRAFTS, "files", "ledgers", "open", "runners")
# Seconds after its last byte from which on a draft is what a killed process left.
STALE = 2 * 3600
WRITE_BYTES = 1 << 18


class LocalRoot:
    """See `cluster.batch.server.root.Root`.

    A directory that is there already keeps its modes: others may have a part of it. Ours below it are closed to them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drafts: dict[str, tuple[int, float]] = {}  # when each was written last, and since when that is seen so
        make_folder(folder)
        make_folders(folder, folder / DRAFTS)
        for name in OURS:
            close_to_others(folder / name)
        self.sweep()
        self.draft().discard()  # it can be written to

    def read(self, path: str) -> bytes | None:
        """Return what a small file holds, None where there is none."""
        try:
            return (self._folder / path).read_bytes()
        except FileNotFoundError:
            return None

    def read_all(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return what small files hold, in their order."""
        return [self.read(path) for path in paths]

    def write(self, path: str, data: bytes) -> None:
        """Put a small file in place."""
        draft = self.draft()
        try:
            draft.write(data)
            draft.put(path)
        finally:
            draft.discard()

    def create(self, path: str, data: bytes) -> bool:
        """Put a small file in place where there is none; return whether what lies there now is `data`."""
        draft = self.draft()
        try:
            draft.write(data)
            return draft.link(path) or self.read(path) == data  # NFS may tell of a failure what it has done
        finally:
            draft.discard()

    def draft(self) -> LocalDraft:
        """Begin a large file."""
        return LocalDraft(self._folder, self._folder / DRAFTS / token_hex(16))

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        return (self._folder / path).open("rb")

    def place(self, path: str) -> str:
        """Return the absolute path of a file."""
        return str(self._folder / path)

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder."""
        try:
            return os.listdir(self._folder / folder)
        except FileNotFoundError:
            return []

    def remove(self, path: str) -> None:
        """Remove a file or a folder, if it is there."""
        target = self._folder / path
        with suppress(FileNotFoundError):  # another router may be removing it as well
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink()

    def sweep(self) -> None:
        """Remove the drafts that killed processes left: those that nobody wrote to while this process looked on."""
        now, before, self._drafts = time.monotonic(), self._drafts, {}
        for path in (self._folder / DRAFTS).iterdir():
            with suppress(FileNotFoundError):  # it was put in place, or another router removed it
                written = path.stat().st_mtime_ns
                last, since = before.get(path.name, (written, now))
                if last == written and now - since > STALE:
                    path.unlink()
                else:
                    self._drafts[path.name] = (written, since if last == written else now)


class LocalDraft:
    """See `cluster.batch.server.root.Draft`."""

    def __init__(self, root: Path, path: Path) -> None:
        self.size = 0
        self._root = root
        self._path = path
        self._file = open(path, "xb", WRITE_BYTES, opener=opener)  # noqa: SIM115 - `put` and `discard` close it
        self._there = True

    def write(self, data: bytes, /) -> int:
        """Take bytes; return how many."""
        self.size += len(data)
        return self._file.write(data)

    def put(self, path: str) -> None:
        """Put it in place."""
        target = self._finished(path)
        self._path.replace(target)
        self._there = False
        _sync_folders(target)

    def link(self, path: str) -> bool:
        """Put it in place where there is nothing; return whether there was not. To be discarded all the same."""
        target = self._finished(path)
        try:
            os.link(self._path, target)
        except FileExistsError:
            return False
        _sync_folders(target)
        return True

    def discard(self) -> None:
        """Remove it, unless it is in place."""
        if not self._there:
            return
        with suppress(OSError):  # what a full disk did not take is not wanted any more
            self._file.close()
        self._path.unlink(missing_ok=True)
        self._there = False

    def _finished(self, path: str) -> Path:
        """Have it on the disk, and return where it is to lie."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        target = self._root / path
        make_folders(self._root, target.parent)
        return target


def _sync_folders(target: Path) -> None:
    for folder in (target.parent, target.parent.parent):  # which may be new, too
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
