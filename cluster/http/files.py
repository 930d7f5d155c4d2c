"""`/v1/files`: what clients leave as the input of batches, and what batches leave for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, BinaryIO
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.routing import Route

from cluster.batch.server.ids import FILE_IDS
from cluster.batch.server.objects import StoredFile
from cluster.batch.server.store import storage_full
from cluster.errors import ApiError
from cluster.http.batch_fields import MOST_FILES, ExpiresAfter, FileFields, FileListFields
from cluster.http.exchange import body_blocks, disconnected, refuse_encoded, until_disconnect
from cluster.http.multipart import UploadForm, boundary_of, too_large_file
from cluster.http.storage import ByMethod, Call, Stored, listed, page_asked, query_of
from cluster.http.under_way import UnderWay
from cluster.ingress.guard import WINDOWED
from cluster.openai.checking import checked_fields
from cluster.openai.off_loop import FileThreads

BLOCK_BYTES = 1 << 18  # that an upload or a download holds at a time, and a thread handles at once
FORM_BYTES = 1 << 16  # of an upload beside the content of its file
UPLOAD_TIMEOUT = 3600.0  # seconds
_EXPIRY = "expires_after"


class FileRoutes:
    """The routes around one store."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._under_way = UnderWay()

    def routes(self) -> list[Route]:
        """Return them."""
        acts = {
            "/v1/files": {"GET": self._list, "POST": self._upload},
            "/v1/files/{id}": {"GET": self._one, "DELETE": self._delete},
            "/v1/files/{id}/content": {"GET": self._content},
        }
        return [Route(path, ByMethod(self._stored, each), methods=list(each)) for path, each in acts.items()]

    async def _upload(self, call: Call) -> None:
        """Take a file in. Whoever hangs up before the answer is there left a whole file, or none."""
        store, threads = self._stored.opened(), self._stored.threads
        headers = Headers(scope=call.scope)
        refuse_encoded(headers)
        boundary = boundary_of(headers.get("content-type", ""))
        most, too_large = await self._bound(call)
        form = UploadForm(boundary, store.files.draft, _check_fields, most, too_large)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > most + FORM_BYTES:
            raise too_large
        try:
            await _take_in(call, form, threads, most + FORM_BYTES, too_large)
            filename, draft = form.finish()
            fields = checked_fields(FileFields, {**_whole(form.fields), "file": filename})
            seconds = None if fields.expires_after is None else fields.expires_after.seconds
            stored = await threads.run(
                lambda: store.keep_input(draft, call.tenant, filename, call.most_stored, seconds), call.tenant
            )
        finally:
            await threads.run(form.discard, call.tenant)
        await call.reply(stored.shown())

    async def _bound(self, call: Call) -> tuple[int, ApiError]:
        """Return the most bytes that a file may have now, and the error of one that has more."""
        most, most_stored = self._stored.opened().max_file_bytes, call.most_stored
        if most_stored is None:
            return most, too_large_file(most)
        left = await self._stored.run(call.tenant, lambda store: store.room_left(call.tenant, most_stored))
        return (most, too_large_file(most)) if left >= most else (left, storage_full(most_stored))

    async def _list(self, call: Call) -> None:
        asked = query_of(call.scope, FileListFields)
        page = page_asked(asked.limit, MOST_FILES, MOST_FILES, asked.after, FILE_IDS, asked.order == "asc")
        found = await self._stored.run(  # of thousands, it takes tens of milliseconds to tell of them
            call.tenant, lambda store: listed(store.files.page(call.tenant, page, asked.purpose))
        )
        await call.reply(found)

    async def _one(self, call: Call) -> None:
        stored = await self._stored.run(call.tenant, lambda store: store.file(call.id, call.tenant))
        await call.reply(stored.shown())

    async def _delete(self, call: Call) -> None:
        await self._stored.run(call.tenant, lambda store: store.delete_file(call.id, call.tenant))
        await call.reply({"id": call.id, "object": "file", "deleted": True})

    async def _content(self, call: Call) -> None:
        threads = self._stored.threads
        stored, content = await self._stored.run(call.tenant, lambda store: store.open_file(call.id, call.tenant))
        try:
            if call.scope["method"] == "HEAD":
                await call.answer.file(_headers(stored), _nothing())
                return
            with self._under_way.sending(0 if call.scope["state"].get(WINDOWED) else stored.size):
                sending = call.answer.file(_headers(stored), _blocks(content, threads, call.tenant))
                await until_disconnect(call.receive, sending, call.answer)
                await disconnected(call.receive)
        finally:
            await threads.run(content.close, call.tenant)


async def _take_in(call: Call, form: UploadForm, threads: FileThreads, most: int, too_large: ApiError) -> None:
    size = 0
    async for block in body_blocks(call.receive, BLOCK_BYTES, UPLOAD_TIMEOUT, call.deadline):
        size += len(block)
        if size > most:
            raise too_large
        await threads.run(partial(form.feed, block), call.tenant)


def _check_fields(fields: Mapping[str, str]) -> None:
    """Refuse what is wrong before the file comes, which most clients send last."""
    plain = {"file": "", "purpose": "batch"} | _whole(fields)
    expiry = plain.get(_EXPIRY)
    if isinstance(expiry, dict) and len(expiry) == 1 and expiry.keys() < ExpiresAfter.model_fields.keys():
        del plain[_EXPIRY]  # the other half is yet to come
    checked_fields(FileFields, plain)


def _whole(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a form. An object comes in parts: expires_after[anchor] and expires_after[seconds]."""
    whole: dict[str, Any] = {name: value for name, value in fields.items() if not name.startswith(f"{_EXPIRY}[")}
    parts = {name[len(_EXPIRY) + 1 : -1]: value for name, value in fields.items() if name not in whole}
    if not parts:
        return whole
    seconds = parts.get("seconds", "")
    is_number = seconds.isascii() and seconds.isdecimal() and len(seconds) <= 9
    return {**whole, _EXPIRY: {**parts, "seconds": int(seconds)} if is_number else parts}


async def _blocks(content: BinaryIO, threads: FileThreads, tenant: str) -> AsyncIterator[bytes]:
    while block := await threads.run(partial(content.read, BLOCK_BYTES), tenant):
        yield block


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def _headers(stored: StoredFile) -> list[tuple[bytes, bytes]]:
    """Return headers with which no browser takes a client's content for a page of this server."""
    name = quote(stored.filename, safe="")
    return [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(stored.size).encode()),
        (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
