"""What every request passes before any route sees it: an id, the API key, and one count per answer."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import ApiError
from cluster.metrics import Metrics
from cluster.openai.http import Answer

OPEN_PATHS = frozenset({"/health"})
KNOWN_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics"})
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ApiKeys:
    """Accepts any of some keys. Only their hashes are kept; comparing takes the same time for every wrong key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [sha256(key.encode()).digest() for key in keys]

    def accept(self, authorization: str) -> bool:
        """Whether the value of an `Authorization` header holds a known key as its bearer token."""
        scheme, _, key = authorization.partition(" ")
        given = sha256(key.strip().encode("utf-8", "replace")).digest()
        known = [hmac.compare_digest(given, one) for one in self._hashes]
        return scheme.lower() == "bearer" and any(known)


class Gate:
    """ASGI middleware around all routes.

    `scope["state"]["exchange"]` holds `id` (made here; a generation sets its own, which its answer shows) and
    `client_id` (what the client sent as `x-request-id`: only echoed and logged, "" when unfit for either).
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, keys: ApiKeys | None) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it (ASGI)."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # refused before it is accepted
            return
        headers = Headers(scope=scope)
        exchange = {"id": f"req-{secrets.token_hex(16)}", "client_id": _fit(headers.get("x-request-id", ""))}
        scope.setdefault("state", {})["exchange"] = exchange

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = exchange["client_id"] or exchange["id"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                self._metrics.answered(_route_label(scope), message["status"])
            await send(message)

        if self._refused(scope, headers):
            wrong = ApiError("unauthorized", "give the server's API key as 'Authorization: Bearer KEY'")
            wrong.request_id = exchange["id"]
            await Answer(send_named).error(wrong)
            return
        await self._app(scope, receive, send_named)

    def _refused(self, scope: Scope, headers: Headers) -> bool:
        if self._keys is None or _path(scope) in OPEN_PATHS:
            return False
        return not self._keys.accept(headers.get("authorization", ""))


def _path(scope: Scope) -> str:
    """The raw path below the mount point, exactly as routing sees it."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _fit(client_id: str) -> str:
    return client_id if _CLIENT_ID.fullmatch(client_id) else ""


def _route_label(scope: Scope) -> str:
    """The route of a known path: clients must not be able to make up labels."""
    path = _path(scope)
    return path if path in KNOWN_PATHS else "other"
