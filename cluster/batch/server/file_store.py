"""Files by id: a content, and once that is whole `files/ID/meta.json`, which names it. Neither ever changes.

Each attempt to make a batch's output has a content of its own; the file names one of them.

`deleting/ID.*` are marks of those who are about to delete a file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import BinaryIO

import msgspec

from cluster.batch.errors import StoreError
from cluster.batch.server.ids import FILE_IDS, READ_AT_ONCE, Page, PageQuery, page_of
from cluster.batch.server.objects import Purpose, StoredFile
from cluster.batch.server.root import Draft, Root

FOLDER = "files"
META = "meta.json"
DELETING = "deleting"


class FileStore:
    """All methods block, and raise `OSError`."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._known: dict[str, StoredFile] = {}  # by id, of those that were looked through

    def draft(self) -> Draft:
        """Begin the content of a file."""
        return self._root.draft()

    def add(
        self, draft: Draft, tenant: str, filename: str, purpose: Purpose, expires_after: int | None = None
    ) -> StoredFile:
        """Make a new file of a finished draft. expires_after: seconds; None = it is kept until it is deleted."""
        stored = _of(draft, FILE_IDS.new(tenant), tenant, filename, purpose, "content", expires_after)
        draft.put(_content(stored))
        try:
            self.publish(stored)
        except BaseException:
            self._root.remove(file_folder(stored.id))
            raise
        return stored

    def add_unpublished(
        self, draft: Draft, tenant: str, filename: str, file_id: str, expires_after: int | None = None
    ) -> StoredFile:
        """Keep a finished draft as what a batch may leave, beside those of other attempts: no file before `tell`."""
        stored_as = f"content-{token_hex(8)}"
        stored = _of(draft, file_id, tenant, filename, "batch_output", stored_as, expires_after)
        draft.put(_content(stored))
        return stored

    def publish(self, stored: StoredFile) -> None:
        """Have a file seen whose content is in place."""
        self._root.write(_path(stored.id, META), msgspec.json.encode(stored))

    def remove_unpublished(self, stored: StoredFile) -> None:
        """Remove what `add_unpublished` kept and was not published."""
        self._root.remove(_content(stored))

    def get(self, file_id: str, tenant: str) -> StoredFile | None:
        """Return a tenant's file, None where it has none of this id, however that is spelt."""
        if not FILE_IDS.fits(file_id):
            return None
        stored = _decoded(self._root.read(_path(file_id, META)), file_id)
        return stored if stored is not None and stored.tenant == tenant else None

    def open(self, stored: StoredFile) -> BinaryIO:
        """Open the content; raises `FileNotFoundError` when it was deleted."""
        return self._root.open(_content(stored))

    def place(self, stored: StoredFile) -> str:
        """Return where the content lies: an absolute path, or a URL. For the runner of a batch."""
        return self._root.place(_content(stored))

    def page(self, tenant: str, asked: PageQuery, purpose: str | None = None) -> Page[StoredFile]:
        """Return a page of a tenant's files. purpose: None = any."""

        def read(ids: Sequence[str]) -> Iterable[StoredFile | None]:
            metas = self._root.read_all([_path(one, META) for one in ids])
            for file_id, meta in zip(ids, metas, strict=True):
                stored = _decoded(meta, file_id)
                listed = stored is not None and stored.tenant == tenant and purpose in (None, stored.purpose)
                yield stored if listed else None

        return page_of(self._ids(tenant), asked, read)

    def count(self, tenant: str) -> int:
        """Return how many files a tenant has."""
        return len(self._ids(tenant))

    def stored_bytes(self, tenant: str) -> int:
        """Return what the contents of a tenant's files take."""
        ids = self._ids(tenant)
        there = set(ids)
        for one in [one for one in list(self._known.values()) if one.tenant == tenant]:
            if one.id not in there:
                self._known.pop(one.id, None)
        return sum([one.size for one in self._readable(ids) if one.tenant == tenant])

    def _ids(self, tenant: str) -> list[str]:
        return [one for one in self._root.names(FOLDER) if FILE_IDS.may_be_of(one, tenant)]

    def expired(self, now: float) -> list[StoredFile]:
        """Return all tenants' files whose time is over. now: seconds since 1970."""
        ids = [one for one in self._root.names(FOLDER) if FILE_IDS.fits(one)]
        self._known = {one: self._known[one] for one in ids if one in self._known}
        return [one for one in self._readable(ids) if one.expires_at is not None and one.expires_at <= now]

    def _readable(self, ids: Sequence[str]) -> list[StoredFile]:
        """Return the files among `ids`. Each is read once, since none ever changes; damaged ones are left out."""
        known = self._known
        new = [one for one in ids if one not in known]
        for start in range(0, len(new), READ_AT_ONCE):
            some = new[start : start + READ_AT_ONCE]
            for file_id, meta in zip(some, self._root.read_all([_path(one, META) for one in some]), strict=True):
                with suppress(StoreError):
                    if (stored := _decoded(meta, file_id)) is not None:
                        known[file_id] = stored
        return [known[one] for one in ids if one in known]

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
        """Delete a file, and all its marks. Open readers on a disk of this machine read on."""
        self._root.remove(_path(file_id, META))
        self._root.remove(file_folder(file_id))
        for mark in self._marks(file_id):
            self._root.remove(mark)

    def _marks(self, file_id: str) -> list[str]:
        return [f"{DELETING}/{name}" for name in self._root.names(DELETING) if name.startswith(f"{file_id}.")]


def file_folder(file_id: str) -> str:
    """Return the path of all that is kept of a file."""
    return f"{FOLDER}/{file_id}"


def _of(
    draft: Draft,
    file_id: str,
    tenant: str,
    filename: str,
    purpose: Purpose,
    stored_as: str,
    expires_after: int | None,
) -> StoredFile:
    now = int(time.time())
    return StoredFile(
        id=file_id,
        tenant=tenant,
        filename=filename,
        purpose=purpose,
        size=draft.size,
        created_at=now,
        stored_as=stored_as,
        expires_at=None if expires_after is None else now + expires_after,
    )


def _path(file_id: str, name: str) -> str:
    return f"{file_folder(file_id)}/{name}"


def _content(stored: StoredFile) -> str:
    return _path(stored.id, stored.stored_as)


def _decoded(meta: bytes | None, file_id: str) -> StoredFile | None:
    try:
        return None if meta is None else msgspec.json.decode(meta, type=StoredFile)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{_path(file_id, META)} is damaged ({error})") from error
