"""Answers that outlive their connection: background and stored responses, repeated keys, and streams gone on with.

Source: OpenAI API reference, "Responses" and its guide of background mode; WHATWG HTML, server-sent events
(`id`, `Last-Event-ID`); the IETF's draft of the `Idempotency-Key` header.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Set
from functools import partial
from hashlib import blake2b
from typing import Any

from msgspec import json, structs
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from cluster.admission.deadline import deadline_exceeded
from cluster.admission.tenants import Visit
from cluster.answer_log import ANSWER_LOG, AnswerLog
from cluster.client_id import SESSION_HEADER
from cluster.errors import ApiError
from cluster.http.asgi import Answer, read_body, until_disconnect
from cluster.http.endpoints import Endpoint, Responder, Services
from cluster.http.giving import Give, give_elsewhere, send_events, send_response, send_whole, show, whole_response
from cluster.openai.body import checked_fields, packed_json, parse_json
from cluster.openai.input_items import items_page
from cluster.openai.response_fields import REFUSED_ITEMS_QUERY, REFUSED_QUERY, ItemsQuery, ResponseQuery
from cluster.responses.record import Head
from cluster.responses.store import ResponseStore
from engine.errors import InvalidRequestError

KEY_HEADER, LAST_HEADER = "idempotency-key", "last-event-id"
LONGEST_KEY = 255
RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
PREFIXES = {RESPONSES: "resp_", CHAT: "chatcmpl-", "/v1/completions": "cmpl-"}
# A body without a match asks for nothing to be kept; names may be written with escapes of their letters.
_OF_KEPT = re.compile(rb'"background"|"store"|"previous_response_id"|\\u00[5-7]')


class KeptEndpoint(Responder):
    """A POST route. What asks for it is kept and given out from there; all else goes straight to `endpoint`."""

    def __init__(self, endpoint: Endpoint, services: Services, path: str, store: ResponseStore | None) -> None:
        self._endpoint = endpoint
        self._services = services
        self._path = path
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        headers = Headers(scope=scope)
        plain = self._path != RESPONSES and KEY_HEADER not in headers and LAST_HEADER not in headers
        await (self._endpoint(scope, receive, send) if plain else super().__call__(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        state, headers = scope["state"], Headers(scope=scope)
        key, behind = _key(headers), _last_event(headers)
        if behind is not None and key is None:
            raise _refused(LAST_HEADER, "is taken with the Idempotency-Key of the stream that it goes on with")
        if key is not None and self._store is None:
            raise _refused(KEY_HEADER, "needs a server that keeps answers, and its --response-retention is 0")
        visit = state["visit"]
        body = await read_body(scope, receive, self._services.max_body_bytes, visit.deadline)
        work = self._asked(body, key, behind, headers, state, answer)
        await until_disconnect(receive, work, answer)

    async def _asked(
        self,
        body: bytes,
        key: str | None,
        behind: int | None,
        headers: Headers,
        state: Mapping[str, Any],
        answer: Answer,
    ) -> None:
        """Answer a body, from what is kept where it asks for that."""
        visit, log = state["visit"], state[ANSWER_LOG]
        fields, packed = await self._fields(body, key, visit.tenant.name)
        follows = (
            self._path == RESPONSES and isinstance(fields.get("previous_response_id"), str) and "input" in fields
        )
        if follows and self._store is None:
            message = "needs a server that keeps responses, and its --response-retention is 0"
            raise _refused("previous_response_id", message, "unsupported_value")
        if self._store is None or not _is_kept(fields, key):
            if follows and self._store is not None:
                body = await self._continued(self._store, fields, len(body), visit)
            await self._endpoint.take(body, answer, state["exchange"], visit, log)
            return
        if fields.get("background") and fields.get("store") is False:
            raise ApiError("unsupported_value", "store must be true with background=true, or left out", param="store")
        head = self._head(packed, key, fields, headers, visit.tenant.name, log)
        if key is not None:
            head = structs.replace(head, asked=blake2b(body, digest_size=16).digest())
        complete = partial(self._continued, self._store, fields, len(body), visit) if follows else None
        await self._kept(head, fields, behind, state, answer, complete)

    async def _fields(self, body: bytes, key: str | None, tenant: str) -> tuple[Mapping[str, Any], bytes]:
        """Return the fields of a body that may ask for something to be kept, and what is kept of it."""
        if key is None and _OF_KEPT.search(body) is None:
            return {}, body

        def parse() -> tuple[Mapping[str, Any], bytes]:
            fields = parse_json(body)
            return fields, packed_json(fields) if _is_kept(fields, key) else body

        return await self._services.thread_pool.run(len(body), parse, tenant)

    async def _continued(
        self, store: ResponseStore, fields: Mapping[str, Any], num_bytes: int, visit: Visit
    ) -> bytes:
        """Return the body with the input and the output of the previous response before its own input.

        num_bytes: of the body. Raises `ApiError`: 400 where that response is not kept, or has not ended well, 504
        where it has not ended within the request's deadline.
        """
        name, param, tenant = fields["previous_response_id"], "previous_response_id", visit.tenant.name
        try:
            async with asyncio.timeout_at(visit.deadline):
                head, response = await whole_response(store, name, tenant)
        except TimeoutError:
            raise deadline_exceeded(f"the request's deadline passed before its {param} was complete") from None
        except ApiError as error:
            error.param = param
            if error.code != "not_found":
                raise
            message = f"Previous {error.message[0].lower()}{error.message[1:]}"
            raise ApiError("previous_response_not_found", message, param=param) from error  # as OpenAI says it

        def join() -> bytes:
            before, last = parse_json(head.body), json.decode(response or b"{}")
            if last.get("status") not in ("completed", "incomplete"):
                message = f"{param}: that response has ended as {last.get('status')!r}; name one that is complete"
                raise ApiError("invalid_value", message, param=param, status=400)
            items = [*_items(before.get("input")), *last["output"], *_items(fields.get("input"))]
            return packed_json({**fields, "input": items})

        return await self._services.thread_pool.run(num_bytes + len(head.body) + len(response), join, tenant)

    def _head(
        self,
        body: bytes,
        key: str | None,
        fields: Mapping[str, Any],
        headers: Headers,
        tenant: str,
        log: AnswerLog,
    ) -> Head:
        prefix, exchange = PREFIXES[self._path], log.exchange or secrets.token_hex(16)
        name, seed = prefix + exchange, None  # the same at all routers that are asked, as `born` is
        if key is not None:
            digest = blake2b(f"{self._path}\n{tenant}\n{key}".encode(), digest_size=24).digest()
            name, seed = prefix + digest[:16].hex(), int.from_bytes(digest[16:]) >> 1
        elif log.facts is not None:
            name = log.facts.request_id
        background = self._path == RESPONSES and fields.get("background") is True
        session = headers.get(SESSION_HEADER, "")
        by_id, stays = fields.get("store") is not False, background or fields.get("store") is True
        return Head(
            name, self._path, body, tenant, exchange, b"", seed, background, session, by_id, needs_client=not stays
        )

    async def _kept(
        self,
        head: Head,
        fields: Mapping[str, Any],
        behind: int | None,
        state: Mapping[str, Any],
        answer: Answer,
        complete: Callable[[], Awaitable[bytes]] | None,
    ) -> None:
        """Give out an answer that is kept, from its beginning or behind an event.

        complete: returns the body by which it is begun where it is not the client's.
        """
        if self._store is None:
            raise RuntimeError("nothing is kept here")
        exchange, log = state["exchange"], state[ANSWER_LOG]
        streams = fields.get("stream") is True
        async with self._store.joined(head, state["visit"], log, complete) as (_, view):
            show(view, exchange, log)
            if streams:
                give: Give = partial(send_events, behind=-1 if behind is None else behind)
            elif self._path == RESPONSES:
                give = partial(send_response, wait=not head.background)
            else:
                give = send_whole
            moved = await give(view, answer)
        if moved is not None:
            await give_elsewhere(self._store, head, moved, answer)


def refuse_kept(scope: Scope) -> None:
    """Raise `ApiError` (400) for a request whose answer is to be kept, on a route of which none is."""
    for name in (KEY_HEADER, LAST_HEADER):
        if name in Headers(scope=scope):
            message = "is not taken here; /v1/chat/completions, /v1/completions and /v1/responses can be kept"
            raise _refused(name, message, "unsupported_parameter")


class KeptResponseEndpoint(Responder):
    """`GET`, `DELETE` and `POST .../cancel` of `/v1/responses/{response_id}`."""

    def __init__(self, store: ResponseStore | None, cancels: bool = False) -> None:
        self._store = store
        self._cancels = cancels

    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        await until_disconnect(receive, self._act(scope, answer), answer)

    async def _act(self, scope: Scope, answer: Answer) -> None:
        state = scope["state"]
        name, tenant = scope["path_params"]["response_id"], state["tenant"].name
        store = _store_of(name, self._store)
        query = _query(scope) if scope["method"] == "GET" else ResponseQuery()
        behind = _behind(query, _last_event(Headers(scope=scope)))
        if scope["method"] == "DELETE":
            await store.delete(name, tenant)
            body = {"id": name, "object": "response", "deleted": True}
            await answer.json(200, json.encode(body))
            return
        if self._cancels:
            await store.cancel(name, tenant)
        async with store.found(name, tenant) as (found, view):
            while not ((view.response and view.current) or view.over):
                await view.changed()
            show(view, state["exchange"], state[ANSWER_LOG])
            give: Give = partial(send_response, wait=False)
            if query.stream:
                give = partial(send_events, behind=behind)
            head, moved = found, await give(view, answer)
        if moved is not None:
            await give_elsewhere(store, head, moved, answer)


class InputItemsEndpoint(Responder):
    """`GET /v1/responses/{response_id}/input_items`."""

    def __init__(self, services: Services, store: ResponseStore | None) -> None:
        self._services = services
        self._store = store

    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        await until_disconnect(receive, self._list(scope, answer), answer)

    async def _list(self, scope: Scope, answer: Answer) -> None:
        name, tenant = scope["path_params"]["response_id"], scope["state"]["tenant"].name
        store = _store_of(name, self._store)
        query = checked_fields(ItemsQuery, _parameters(scope, {"limit"}), REFUSED_ITEMS_QUERY)
        head = await store.head_by_id(name, tenant)

        def page() -> bytes:
            return json.encode(items_page(parse_json(head.body)["input"], name, query))

        await answer.json(200, await self._services.thread_pool.run(len(head.body), page, tenant))


class KeptChatEndpoint(Responder):
    """`DELETE /v1/chat/completions/{completion_id}`: ends one that a key keeps, and forgets it."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        name, tenant = scope["path_params"]["completion_id"], scope["state"]["tenant"].name
        if self._store is None or not name.startswith(PREFIXES[CHAT]) or len(name) > 100:
            message = f"no chat completion {name[:100]!r} is kept here: only those with an Idempotency-Key are"
            raise ApiError("not_found", message, param="completion_id")
        try:
            await self._store.delete(name, tenant)
        except ApiError as error:
            error.param = "completion_id" if error.param else None
            raise
        body = {"object": "chat.completion.deleted", "id": name, "deleted": True}
        await answer.json(200, json.encode(body))


def _is_kept(fields: Mapping[str, Any], key: str | None) -> bool:
    """Whether a request asks for its answer to be kept."""
    return key is not None or fields.get("store") is True or fields.get("background") is True


def _store_of(name: str, store: ResponseStore | None) -> ResponseStore:
    """Return the store that may keep a response of this name. Raises `ApiError` (404)."""
    if store is None:
        message = "this server keeps no responses: its --response-retention is 0"
        raise ApiError("not_found", message, param="response_id")
    if not name.startswith(PREFIXES[RESPONSES]) or len(name) > 100:
        raise ApiError("not_found", f"{name[:100]!r} is no id of a response: they begin with resp_")
    return store


def _items(given: Any) -> list[Any]:
    """Return the items of an input; what is neither a text nor a list is left to the validation of the field."""
    return given if isinstance(given, list) else [{"role": "user", "content": given}]


def _key(headers: Headers) -> str | None:
    found = headers.getlist(KEY_HEADER)
    if not found:
        return None
    if len(found) > 1 or not 0 < len(found[0]) <= LONGEST_KEY or not (found[0].isascii() and found[0].isprintable()):
        raise _refused(KEY_HEADER, f"must be sent once, with 1 to {LONGEST_KEY} printable ASCII characters")
    return found[0]


def _last_event(headers: Headers) -> int | None:
    found = headers.get(LAST_HEADER)
    if found is None:
        return None
    if not (found.isdecimal() and found.isascii() and len(found) < 10):
        raise _refused(LAST_HEADER, "must be the id of the last event that came, a number such as 12")
    return int(found)


def _behind(query: ResponseQuery, last: int | None) -> int:
    """Return the number of the event that a client has last, -1 = none.

    last: of its `Last-Event-ID`, the later word: a client that reconnects by itself repeats its first URL.
    """
    if last is None:
        return -1 if query.starting_after is None else query.starting_after
    if not query.stream:
        raise _refused(LAST_HEADER, "is taken with stream=true")
    if query.starting_after is not None and last < query.starting_after:
        message = f"must not be below starting_after, which is {query.starting_after}; leave one of them out"
        raise _refused(LAST_HEADER, message)
    return last


def _query(scope: Scope) -> ResponseQuery:
    """Return the query of a request; raises `InvalidRequestError` naming the first wrong parameter."""
    found = checked_fields(ResponseQuery, _parameters(scope, {"starting_after"}), REFUSED_QUERY)
    if found.starting_after is not None and not found.stream:
        raise InvalidRequestError("starting_after is allowed only with stream=true", "starting_after")
    return found


def _parameters(scope: Scope, numbers: Set[str]) -> dict[str, Any]:
    """Return the parameters of a query. numbers: names of those that are. Raises `InvalidRequestError`."""
    given: dict[str, Any] = {}
    for name, value in QueryParams(scope["query_string"]).multi_items():
        if name in given:
            raise InvalidRequestError(f"{name} may be given once", name)
        given[name] = value
        if name == "stream" and value in ("true", "false"):
            given[name] = value == "true"
        elif name in numbers and value.isdecimal() and value.isascii() and len(value) < 10:
            given[name] = int(value)
    return given


def _refused(name: str, message: str, code: str = "invalid_value") -> ApiError:
    shown = {KEY_HEADER: "Idempotency-Key", LAST_HEADER: "Last-Event-ID"}.get(name, name)
    return ApiError(code, f"{shown} {message}", param=shown, status=400)
