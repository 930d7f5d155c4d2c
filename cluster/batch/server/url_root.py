"""A place behind a URL, by fsspec.

An object store (s3, gs, abfs) shows an uploaded file whole or not at all. Other file systems (sftp, hdfs) show one
that is being uploaded: there, a content is whole once the file that describes it is there, which comes last.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, BinaryIO

READERS = 16  # small files that are fetched at a time
COPY_BYTES = 1 << 20


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
            # came of it: what lies there tells.
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
