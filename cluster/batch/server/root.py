"""Where files and batches are kept: a directory, or a URL by fsspec. Paths below it are made of our own ids alone.

A directory is of this machine, or several share it. What is in place is on the disk, and its owner's alone. Behind a
URL, an object store (s3, gs, abfs) shows an uploaded file whole or not at all. Other file systems (sftp, hdfs) show
one that is being uploaded: there, a content is whole once the file that describes it is there, which comes last.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, Protocol

from cluster.batch.errors import InputError
from cluster.batch.io.paths import file_system, is_url, local_path
from cluster.private_files import close_to_others, make_folder, make_folders, opener
from engine.errors import ConfigError

DRAFTS = "drafts"
# All folders that a server has in it, which earlier versions made open to all.
OURS = ("batches", "deleting", DRAFTS, "files", "ledgers", "open", "runners")
# Seconds after its last byte from which on a draft is what a killed process left.
STALE = 2 * 3600
WRITE_BYTES = 1 << 18
READERS = 16  # small files that are fetched at a time
COPY_BYTES = 1 << 20
FLAG = "batch_dir"


class Draft(Protocol):
    """A file that is being written and not visible yet. Used by one thread at a time; ends with `put` or `discard`.

    One that got no byte for two hours is taken for what a killed process left, and may be removed.
    """

    @property
    def size(self) -> int:
        """Bytes so far."""
        ...

    def write(self, data: bytes, /) -> int:
        """Take them all; return how many. Raises `OSError`."""
        ...

    def put(self, path: str) -> None:
        """Put it in place: there and whole, or not there. Raises `OSError`."""
        ...

    def discard(self) -> None:
        """Remove it, unless it is in place. Can be called twice."""
        ...


class Root(Protocol):
    """All methods block, may be called from any thread, and raise `OSError`. Paths have `/` between names."""

    def read(self, path: str) -> bytes | None:
        """Return what a small file holds, None where there is none."""
        ...

    def read_all(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return what small files hold, in their order."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Put a small file in place, over another one if there is one: readers see either whole."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Put a small file in place where there is none, and return whether what lies there now is `data`.

        Of several that create one file, one alone gets True. On a disk, on NFS, and where the store takes
        conditional writes (Amazon S3, Google Cloud Storage, Azure Blob Storage) that is certain; elsewhere (sftp,
        hdfs) two that do so within one round trip may both be told True, and what came last stays.
        """
        ...

    def draft(self) -> Draft:
        """Begin a large file."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading; raises `FileNotFoundError`."""
        ...

    def place(self, path: str) -> str:
        """Return where a file lies, for those who open it themselves: an absolute path, or a URL."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder, in any order; none where there is no such folder."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing where there is neither."""
        ...

    def sweep(self) -> None:
        """Remove the drafts that killed processes left."""
        ...


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
            return draft.link(path) or self.read(path) == data  # NFS may report as failed what it has done
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
        """Remove the drafts that killed processes left: those that did not change while this process watched."""
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


class UrlRoot:
    """See `cluster.batch.server.root.Root`. files: fsspec's file system. path: in it."""

    def __init__(self, files: Any, path: str) -> None:
        self._files = files
        self._path = path.rstrip("/")

    def read(self, path: str) -> bytes | None:
        """Return what a small file holds, None where there is none."""
        try:
            data: bytes = self._files.cat_file(self._at(path))
        except FileNotFoundError:
            return None
        return data

    def read_all(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return what small files hold, in their order."""
        if len(paths) == 1:
            return [self.read(paths[0])]
        with ThreadPoolExecutor(READERS, "batch-url") as readers:
            return list(readers.map(self.read, paths))

    def write(self, path: str, data: bytes) -> None:
        """Put a small file in place."""
        with self.opened_for_writing(path) as file:
            file.write(data)

    def create(self, path: str, data: bytes) -> bool:
        """Put a small file in place where there is none; return whether what lies there now is `data`."""
        try:
            self._files.pipe_file(self._at(path), data, mode="create")
        except Exception:
            # Each library has its own words for what is there already, and an answer that was lost leaves open what
            # came of it: what lies there shows.
            held = self.read(path)
            if held is None:
                raise
            return held == data
        return self.read(path) == data  # a store may not know the condition, and write over another's

    def draft(self) -> UrlDraft:
        """Begin a large file."""
        return UrlDraft(self)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        file: BinaryIO = self._files.open(self._at(path), "rb")
        return file

    def place(self, path: str) -> str:
        """Return the URL of a file."""
        url: str = self._files.unstrip_protocol(self._at(path))
        return url

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder."""
        self._files.invalidate_cache()  # others write there, too
        try:
            found = self._files.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        return [one.rstrip("/").rpartition("/")[2] for one in found]

    def remove(self, path: str) -> None:
        """Remove a file or a folder, if it is there."""
        self._files.invalidate_cache()
        try:
            self._files.rm(self._at(path), recursive=True)
        except FileNotFoundError:
            return

    def sweep(self) -> None:
        """Remove nothing: drafts have no names, and are gone with their process."""

    def opened_for_writing(self, path: str) -> Any:
        """Open a file that is uploaded when it is closed; its folder is made where the file system has such."""
        try:
            return self._files.open(self._at(path), "wb")
        except FileNotFoundError:
            self._files.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            return self._files.open(self._at(path), "wb")

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}"


class UrlDraft:
    """See `cluster.batch.server.root.Draft`: a file without a name on this machine, uploaded in the end."""

    def __init__(self, root: UrlRoot) -> None:
        self.size = 0
        self._root = root
        with ExitStack() as stack:
            self._file = stack.enter_context(tempfile.TemporaryFile())
            self._open = stack.pop_all()

    def write(self, data: bytes, /) -> int:
        """Take bytes; return how many."""
        self.size += len(data)
        return self._file.write(data)

    def put(self, path: str) -> None:
        """Put it in place."""
        self._file.seek(0)
        try:
            with self._root.opened_for_writing(path) as target:
                shutil.copyfileobj(self._file, target, COPY_BYTES)
        except BaseException:
            self._root.remove(path)  # closing it uploads what there was
            raise
        self._open.close()

    def discard(self) -> None:
        """Remove it, unless it is in place."""
        self._open.close()


def open_root(place: str) -> Root:
    """Return the root at an absolute path or a URL, made if need be. Raises `ConfigError` naming the setting."""
    try:
        if is_url(place):
            root = UrlRoot(*file_system(place))
            root.names("files")  # it is there, and opens to us
            return root
        path = Path(local_path(place))
        if not path.is_absolute():
            raise ConfigError(
                f"{FLAG}: must be an absolute path or a URL, such as /var/lib/squadron, not {place!r}", FLAG
            )
        return LocalRoot(path)
    except InputError as error:
        raise ConfigError(f"{FLAG}: {error}", FLAG) from error
    except OSError as error:
        raise ConfigError(f"{FLAG}: {place} cannot be used: {error.strerror or error}", FLAG) from error
