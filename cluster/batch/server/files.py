"""Files by id: `files/ID/content`, and once that is whole `files/ID/meta.json`. Neither changes, but that the
runner of a batch that has not ended may write its output again.

`deleting/ID.*` are marks of those who are about to delete a file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import BinaryIO

import msgspec

from cluster.batch.server.errors import StoreError
from cluster.batch.server.ids import FILE_IDS
from cluster.batch.server.objects import Purpose, StoredFile
from cluster.batch.server.pages import Asked, Page, page_of
from cluster.batch.server.root import Draft, Root

FOLDER = "files"
META = "meta.json"
DELETING = "deleting"


class FileStore:
    """All methods block, and raise `OSError`."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def draft(self) -> Draft:
        """Begin the content of a file."""
        return self._root.draft()

    def add(
        self, draft: Draft, tenant: str, filename: str, purpose: Purpose, file_id: str | None = None
    ) -> StoredFile:
        """Make a file of a finished draft. file_id: of a file that is replaced if it is there; None = a new one."""
        file_id, size = file_id or FILE_IDS.new(tenant), draft.size
        stored = StoredFile(
            id=file_id,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            size=size,
            created_at=int(time.time()),
        )
        draft.put(_path(file_id, "content"))
        try:
            self._root.write(_path(file_id, META), msgspec.json.encode(stored))
        except BaseException:
            self._root.remove(f"{FOLDER}/{file_id}")
            raise
        return stored

    def get(self, file_id: str, tenant: str) -> StoredFile | None:
        """Return a tenant's file, None where it has none of this id, however that is spelt."""
        if not FILE_IDS.fits(file_id):
            return None
        stored = _decoded(self._root.read(_path(file_id, META)), file_id)
        return stored if stored is not None and stored.tenant == tenant else None

    def open(self, stored: StoredFile) -> BinaryIO:
        """Open the content; raises `FileNotFoundError` when it was deleted."""
        return self._root.open(_path(stored.id, "content"))

    def place(self, stored: StoredFile) -> str:
        """Return where the content lies: an absolute path, or a URL. For the runner of a batch."""
        return self._root.place(_path(stored.id, "content"))

    def page(self, tenant: str, asked: Asked, purpose: str | None = None) -> Page[StoredFile]:
        """Return a page of a tenant's files. purpose: None = any."""

        def read(ids: Sequence[str]) -> Iterable[StoredFile | None]:
            metas = self._root.read_all([_path(one, META) for one in ids])
            for file_id, meta in zip(ids, metas, strict=True):
                stored = _decoded(meta, file_id)
                listed = stored is not None and stored.tenant == tenant and purpose in (None, stored.purpose)
                yield stored if listed else None

        ids = [one for one in self._root.names(FOLDER) if FILE_IDS.may_be_of(one, tenant)]
        return page_of(ids, asked, read)

    def mark_deleting(self, file_id: str) -> str:
        """Note that a file is about to be deleted, so that no batch takes it up; returns what `unmark` takes.

        A mark that is left by a process that was killed stays until the file is deleted in another attempt.
        """
        mark = f"{DELETING}/{file_id}.{token_hex(8)}"
        self._root.write(mark, b"")
        return mark

    def unmark(self, mark: str) -> None:
        """Take a mark off: the file stays."""
        self._root.remove(mark)

    def is_deleting(self, file_id: str) -> bool:
        """Whether a file has such a mark."""
        return bool(self._marks(file_id))

    def remove(self, file_id: str) -> None:
        """Delete a file, and all its marks. Whoever reads it on a disk of this machine reads on."""
        self._root.remove(_path(file_id, META))
        self._root.remove(f"{FOLDER}/{file_id}")
        for mark in self._marks(file_id):
            self._root.remove(mark)

    def _marks(self, file_id: str) -> list[str]:
        return [f"{DELETING}/{name}" for name in self._root.names(DELETING) if name.startswith(f"{file_id}.")]


def _path(file_id: str, name: str) -> str:
    return f"{FOLDER}/{file_id}/{name}"


def _decoded(meta: bytes | None, file_id: str) -> StoredFile | None:
    try:
        return None if meta is None else msgspec.json.decode(meta, type=StoredFile)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{_path(file_id, META)} is damaged ({error})") from error
