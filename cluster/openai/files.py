"""`/v1/files`: what clients leave as the input of batches, and what batches leave for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import BinaryIO
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.routing import Route

from cluster.batch.server.ids import FILE_IDS
from cluster.batch.server.objects import StoredFile
from cluster.ingress.guard import WINDOWED
from cluster.openai.batch_fields import MOST_FILES, REFUSED_FILE, FileFields, FileListFields
from cluster.openai.checking import checked_fields
from cluster.openai.http import body_blocks, disconnected, refuse_encoded, until_disconnect
from cluster.openai.multipart import UploadForm, boundary_of, too_large
from cluster.openai.off_loop import FileThreads
from cluster.openai.storage import ByMethod, Call, Stored, listed, page_asked, query_of
from cluster.openai.under_way import UnderWay

BLOCK_BYTES = 1 << 18  # that an upload or a download holds at a time, and a thread handles at once
FORM_BYTES = 1 << 16  # of an upload beside the content of its file
UPLOAD_TIMEOUT = 3600.0  # seconds


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
        headers, most = Headers(scope=call.scope), store.max_file_bytes
        refuse_encoded(headers)
        form = UploadForm(boundary_of(headers.get("content-type", "")), store.files.draft, _check_fields, most)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > most + FORM_BYTES:
            raise too_large(most)
        try:
            await _take_in(call, form, threads, most + FORM_BYTES)
            filename, draft = form.finish()
            checked_fields(FileFields, {**form.fields, "file": filename}, REFUSED_FILE)
            stored = await threads.run(lambda: store.keep_input(draft, call.tenant, filename))
        finally:
            await threads.run(form.discard)
        await call.reply(stored.shown())

    async def _list(self, call: Call) -> None:
        asked = query_of(call.scope, FileListFields)
        page = page_asked(asked.limit, MOST_FILES, MOST_FILES, asked.after, FILE_IDS, asked.order == "asc")
        await call.reply(
            listed(await self._stored.run(lambda store: store.files.page(call.tenant, page, asked.purpose)))
        )

    async def _one(self, call: Call) -> None:
        stored = await self._stored.run(lambda store: store.file(call.id, call.tenant))
        await call.reply(stored.shown())

    async def _delete(self, call: Call) -> None:
        await self._stored.run(lambda store: store.delete_file(call.id, call.tenant))
        await call.reply({"id": call.id, "object": "file", "deleted": True})

    async def _content(self, call: Call) -> None:
        threads = self._stored.threads
        stored, content = await self._stored.run(lambda store: store.open_file(call.id, call.tenant))
        try:
            if call.scope["method"] == "HEAD":
                await call.answer.file(_headers(stored), _nothing())
                return
            with self._under_way.sending(0 if call.scope["state"].get(WINDOWED) else stored.size):
                sending = call.answer.file(_headers(stored), _blocks(content, threads))
                await until_disconnect(call.receive, sending, call.answer)
                await disconnected(call.receive)
        finally:
            await threads.run(content.close)


async def _take_in(call: Call, form: UploadForm, threads: FileThreads, most: int) -> None:
    size = 0
    async for block in body_blocks(call.receive, BLOCK_BYTES, UPLOAD_TIMEOUT, call.deadline):
        size += len(block)
        if size > most:
            raise too_large(most - FORM_BYTES)
        await threads.run(partial(form.feed, block))


def _check_fields(fields: Mapping[str, str]) -> None:
    """Refuse what is wrong before the file comes, which most clients send last."""
    plain = {_field(name): value for name, value in fields.items()}
    checked_fields(FileFields, {"file": "", "purpose": "batch"} | plain, REFUSED_FILE)


def _field(name: str) -> str:
    """Return the field that a part is of. An object comes in parts, such as expires_after[anchor]."""
    field = name.partition("[")[0]
    return field if field in REFUSED_FILE else name


async def _blocks(content: BinaryIO, threads: FileThreads) -> AsyncIterator[bytes]:
    while block := await threads.run(partial(content.read, BLOCK_BYTES)):
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
