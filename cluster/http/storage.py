"""What the routes of files and batches do alike. Without `--batch-dir` they all say so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import json
from starlette.requests import Request
from starlette.types import Receive, Scope

from cluster.admission.tenant import Tenant
from cluster.batch.server.ids import Ids
from cluster.batch.server.pages import Asked, Page
from cluster.batch.server.store import Store
from cluster.errors import ApiError
from cluster.http.base_endpoint import Responder
from cluster.http.exchange import Answer
from cluster.openai.checking import checked_fields
from cluster.openai.field_types import Fields
from cluster.openai.off_loop import FileThreads
from engine.errors import InvalidRequestError

T = TypeVar("T")
F = TypeVar("F", bound=Fields)


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a route. `id`: of the file or batch that its path names, "" without; not checked."""

    scope: Scope
    receive: Receive
    answer: Answer

    @property
    def tenant(self) -> str:
        """Who asks."""
        tenant: Tenant = self.scope["state"]["tenant"]
        return tenant.name

    @property
    def most_stored(self) -> int | None:
        """Bytes that files of who asks may take, None = any number."""
        tenant: Tenant = self.scope["state"]["tenant"]
        return tenant.quota.max_stored_bytes

    @property
    def deadline(self) -> float | None:
        """When a POST must end, on the event loop's clock."""
        deadline: float | None = self.scope["state"]["visit"].deadline
        return deadline

    @property
    def id(self) -> str:
        """As the path spells it."""
        found: str = self.scope["path_params"].get("id", "")
        return found

    async def reply(self, body: Any) -> None:
        """Answer with JSON."""
        await self.answer.json(200, json.encode(body))


@dataclass(frozen=True, slots=True)
class Stored:
    """What the routes share. store: None = nothing is kept."""

    store: Store | None
    threads: FileThreads

    async def run(self, tenant: str, work: Callable[[Store], T]) -> T:
        """Return what `work` makes of the store, in a thread. Raises `ApiError`, also where nothing is kept.

        tenant: who asks.
        """
        store = self.opened()
        return await self.threads.run(lambda: work(store), tenant)

    def opened(self) -> Store:
        """Return the store; raises `ApiError` where nothing is kept."""
        if self.store is None:
            raise ApiError(
                "batches_not_enabled",
                "this server keeps no files and batches; start it with --batch-dir, a directory or a URL for them",
                status=404,
            )
        return self.store


Act = Callable[[Call], Awaitable[None]]


class ByMethod(Responder):
    """One path: what each of its methods does."""

    def __init__(self, stored: Stored, acts: Mapping[str, Act]) -> None:
        self._stored = stored
        self._acts = acts

    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        self._stored.opened()
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._acts[method](Call(scope, receive, answer))


def query_of(scope: Scope, schema: type[F]) -> F:
    """Return the query of a request; raises `InvalidRequestError` naming the first wrong parameter."""
    given: dict[str, Any] = {}
    for name, value in Request(scope).query_params.multi_items():
        if name in given:
            raise InvalidRequestError(f"{name[:64]} is there twice; send it once", name[:64])
        given[name] = value
    limit = given.get("limit")
    if limit is not None:
        given["limit"] = _whole(limit)
    return checked_fields(schema, given)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise InvalidRequestError("limit must be a whole number", "limit", "invalid_type")
    return int(text)


def page_asked(
    limit: int | None, most: int, default: int, after: str | None, ids: Ids, oldest_first: bool = False
) -> Asked:
    """Return which page is asked for; raises `InvalidRequestError`. ids: of what is listed."""
    if limit is not None and not 1 <= limit <= most:
        raise InvalidRequestError(f"limit must lie between 1 and {most}", "limit")
    if after is not None and not ids.fits(after):
        raise InvalidRequestError(f"after must be the id of the last one before, such as {ids.prefix}...", "after")
    return Asked(default if limit is None else limit, after or "", oldest_first)


def listed(page: Page[Any]) -> dict[str, Any]:
    """Return OpenAI's list object."""
    data = [one.shown() for one in page.items]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": page.has_more}
