"""`/v1/files` and `/v1/batches`: requests that are answered within a day, as capacity is left, and their files.

Source: OpenAI API reference, "Files" and "Batch".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal, TypeVar
from urllib.parse import quote

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Scope

from cluster.batch.rows import URLS
from cluster.batch.server.ids import BATCH_IDS, FILE_IDS, Ids, Page, PageQuery
from cluster.batch.server.objects import StoredFile
from cluster.batch.server.store import MOST_FILES, NewBatch, storage_full
from cluster.errors import ApiError
from cluster.http.asgi import body_blocks, disconnected, read_body, refuse_encoded, until_disconnect
from cluster.http.multipart import UploadForm, boundary_of, too_large_file
from cluster.http.storage import ByMethod, FileThreads, StorageRequest, Stored, UnderWay
from cluster.ingress.guard import WINDOWED
from cluster.openai.body import checked_fields, parse_json
from cluster.openai.fields import Fields, Labels, note
from cluster.openai.thread_pool import FairThreadPool
from engine.errors import InvalidRequestError

MOST_BATCHES, USUAL_BATCHES = 100, 20
FEWEST_SECONDS, MOST_SECONDS = 3600, 30 * 86_400  # that a file which expires is kept
_Content = Annotated[str, WithJsonSchema({"type": "string", "format": "binary"})]
BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
BLOCK_BYTES = 1 << 18  # that an upload or a download holds at a time, and a thread handles at once
FORM_BYTES = 1 << 16  # of an upload beside the content of its file
UPLOAD_TIMEOUT = 3600.0  # seconds
_EXPIRY = "expires_after"
F = TypeVar("F", bound=Fields)


def _seconds(value: Any) -> int:
    if type(value) is not int or not FEWEST_SECONDS <= value <= MOST_SECONDS:
        raise PydanticCustomError(
            "seconds", f"must be a whole number between {FEWEST_SECONDS} (an hour) and {MOST_SECONDS} (30 days)"
        )
    return value


class ExpiresAfter(Fields):
    """For how long a file is kept."""

    anchor: Literal["created_at"] = Field(description="created_at: counted from when the file is made")
    seconds: Annotated[
        int,
        BeforeValidator(_seconds),
        WithJsonSchema({"type": "integer", "minimum": FEWEST_SECONDS, "maximum": MOST_SECONDS}),
    ] = Field(description="3600 to 2592000")


class FileFields(Fields):
    """`POST /v1/files`, as multipart/form-data."""

    file: _Content = Field(
        description="the content, with a filename: JSON lines, each a request, of --max-file-bytes at most"
    )
    purpose: Literal["batch"] = Field(description="batch: the input of batches")
    expires_after: ExpiresAfter | None = note(
        "anchor created_at, and 3600 to 2592000 seconds, after which it is deleted; default: it is kept"
    )


class FileListFields(Fields):
    """The query of `GET /v1/files`."""

    after: str | None = note("the id of the last file of the page before")
    limit: int | None = note("1 to 10000 files; default 10000", 1, MOST_FILES)
    order: Literal["asc", "desc"] = note("by time of making: asc, the oldest first, or desc", default="desc")
    purpose: Literal["batch", "batch_output"] | None = note("only inputs (batch), or only outputs (batch_output)")


class BatchFields(Fields):
    """`POST /v1/batches`."""

    input_file_id: str = Field(description="a file that was uploaded with purpose batch")
    endpoint: BatchUrl = Field(description=f"of all its requests: {', '.join(URLS)}")
    completion_window: Literal["24h"] = Field(description="24h: what is not done by then is not done at all")
    metadata: Labels | None = note("at most 16 labels, kept with the batch")
    output_expires_after: ExpiresAfter | None = note("of its output and error file, as expires_after of a file")


class BatchListFields(Fields):
    """The query of `GET /v1/batches`, the newest first."""

    after: str | None = note("the id of the last batch of the page before")
    limit: int | None = note("1 to 100 batches; default 20", 1, MOST_BATCHES)


class NoFields(Fields):
    """`POST /v1/batches/ID/cancel`: nothing, or an empty object."""


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

    async def _upload(self, call: StorageRequest) -> None:
        """Store an upload. A client that disconnects before the answer has left a whole file, or none."""
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
            fields = checked_fields(FileFields, {**_with_objects(form.fields), "file": filename})
            seconds = None if fields.expires_after is None else fields.expires_after.seconds
            stored = await threads.run(
                lambda: store.keep_input(draft, call.tenant, filename, call.most_stored, seconds), call.tenant
            )
        finally:
            await threads.run(form.discard, call.tenant)
        await call.reply(stored.shown())

    async def _bound(self, call: StorageRequest) -> tuple[int, ApiError]:
        """Return the most bytes that a file may have now, and the error of one that has more."""
        most, most_stored = self._stored.opened().max_file_bytes, call.most_stored
        if most_stored is None:
            return most, too_large_file(most)
        left = await self._stored.run(call.tenant, lambda store: store.room_left(call.tenant, most_stored))
        return (most, too_large_file(most)) if left >= most else (left, storage_full(most_stored))

    async def _list(self, call: StorageRequest) -> None:
        asked = query_of(call.scope, FileListFields)
        page = page_asked(asked.limit, MOST_FILES, MOST_FILES, asked.after, FILE_IDS, asked.order == "asc")
        found = await self._stored.run(  # of thousands, describing them takes tens of milliseconds
            call.tenant, lambda store: listed(store.files.page(call.tenant, page, asked.purpose))
        )
        await call.reply(found)

    async def _one(self, call: StorageRequest) -> None:
        stored = await self._stored.run(call.tenant, lambda store: store.file(call.id, call.tenant))
        await call.reply(stored.shown())

    async def _delete(self, call: StorageRequest) -> None:
        await self._stored.run(call.tenant, lambda store: store.delete_file(call.id, call.tenant))
        await call.reply({"id": call.id, "object": "file", "deleted": True})

    async def _content(self, call: StorageRequest) -> None:
        threads = self._stored.threads
        stored, content = await self._stored.run(call.tenant, lambda store: store.open_file(call.id, call.tenant))
        try:
            if call.scope["method"] == "HEAD":
                await call.answer.file(_headers(stored), _nothing())
                return
            with self._under_way.sending(call.tenant, 0 if call.scope["state"].get(WINDOWED) else stored.size):
                sending = call.answer.file(_headers(stored), _blocks(content, threads, call.tenant))
                await until_disconnect(call.receive, sending, call.answer)
                await disconnected(call.receive)
        finally:
            await threads.run(content.close, call.tenant)


async def _take_in(
    call: StorageRequest, form: UploadForm, threads: FileThreads, most: int, too_large: ApiError
) -> None:
    size = 0
    async for block in body_blocks(call.receive, BLOCK_BYTES, UPLOAD_TIMEOUT, call.deadline):
        size += len(block)
        if size > most:
            raise too_large
        await threads.run(partial(form.feed, block), call.tenant)


def _check_fields(fields: Mapping[str, str]) -> None:
    """Refuse what is wrong before the file comes, which most clients send last."""
    plain = {"file": "", "purpose": "batch"} | _with_objects(fields)
    expiry = plain.get(_EXPIRY)
    if isinstance(expiry, dict) and len(expiry) == 1 and expiry.keys() < ExpiresAfter.model_fields.keys():
        del plain[_EXPIRY]  # the other half is yet to come
    checked_fields(FileFields, plain)


def _with_objects(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a form. An object comes in parts: expires_after[anchor] and expires_after[seconds]."""
    whole: dict[str, Any] = {name: value for name, value in fields.items() if not name.startswith(f"{_EXPIRY}[")}
    parts = {name[len(_EXPIRY) + 1 : -1]: value for name, value in fields.items() if name not in whole}
    if not parts:
        return whole
    seconds = parts.get("seconds", "")
    return {**whole, _EXPIRY: {**parts, "seconds": int(seconds)} if _is_whole(seconds) else parts}


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


class BatchRoutes:
    """The routes around one store. max_body_bytes: of a request."""

    def __init__(self, stored: Stored, thread_pool: FairThreadPool, max_body_bytes: int) -> None:
        self._stored = stored
        self._thread_pool = thread_pool
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        """Return them."""
        acts = {
            "/v1/batches": {"GET": self._list, "POST": self._create},
            "/v1/batches/{id}": {"GET": self._one},
            "/v1/batches/{id}/cancel": {"POST": self._cancel},
        }
        return [Route(path, ByMethod(self._stored, each), methods=list(each)) for path, each in acts.items()]

    async def _create(self, call: StorageRequest) -> None:
        asked = checked_fields(BatchFields, await self._fields(call))
        expiry = asked.output_expires_after
        seconds = None if expiry is None else expiry.seconds
        new = NewBatch(asked.input_file_id, asked.endpoint, asked.metadata, seconds)
        record = await self._stored.run(
            call.tenant, lambda store: store.create_batch(new, call.tenant, call.most_stored)
        )
        self._stored.opened().notify_created(record)
        await call.reply(record.shown())

    async def _list(self, call: StorageRequest) -> None:
        asked = query_of(call.scope, BatchListFields)
        page = page_asked(asked.limit, MOST_BATCHES, USUAL_BATCHES, asked.after, BATCH_IDS)
        found = await self._stored.run(call.tenant, lambda store: listed(store.batches.page(call.tenant, page)))
        await call.reply(found)

    async def _one(self, call: StorageRequest) -> None:
        record = await self._stored.run(call.tenant, lambda store: store.batch(call.id, call.tenant))
        await call.reply(record.shown())

    async def _cancel(self, call: StorageRequest) -> None:
        checked_fields(NoFields, await self._fields(call))
        record = await self._stored.run(call.tenant, lambda store: store.cancel_batch(call.id, call.tenant))
        await call.reply(record.shown())

    async def _fields(self, call: StorageRequest) -> Mapping[str, Any]:
        """Return the fields of a body; one that is empty has none."""
        body = await read_body(call.scope, call.receive, self._max_body_bytes, call.deadline)
        return await self._thread_pool.run(len(body), lambda: parse_json(body), call.tenant) if body else {}


def query_of(scope: Scope, schema: type[F]) -> F:
    """Return the query of a request; raises `InvalidRequestError` naming the first wrong parameter."""
    given: dict[str, Any] = {}
    for name, value in Request(scope).query_params.multi_items():
        if name in given:
            raise InvalidRequestError(f"{name[:64]} is there twice; send it once", name[:64])
        given[name] = value
    limit = given.get("limit")
    if limit is not None:
        if not _is_whole(limit):
            raise InvalidRequestError("limit must be a whole number", "limit", "invalid_type")
        given["limit"] = int(limit)
    return checked_fields(schema, given)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9


def page_asked(
    limit: int | None, most: int, default: int, after: str | None, ids: Ids, oldest_first: bool = False
) -> PageQuery:
    """Return which page is asked for; raises `InvalidRequestError`. ids: of what is listed."""
    if limit is not None and not 1 <= limit <= most:
        raise InvalidRequestError(f"limit must lie between 1 and {most}", "limit")
    if after is not None and not ids.fits(after):
        raise InvalidRequestError(f"after must be the id of the last one before, such as {ids.prefix}...", "after")
    return PageQuery(default if limit is None else limit, after or "", oldest_first)


def listed(page: Page[Any]) -> dict[str, Any]:
    """Return OpenAI's list object."""
    data = [one.shown() for one in page.items]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": page.has_more}
