"""What pages of other sites may do with a server: with a key, all that others may; without keys, nothing.

A server without keys trusts whoever reaches it, and any page could have its visitor's browser reach it.
Source: WHATWG Fetch, "CORS protocol".
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope, Send

from cluster.errors import ApiError

_ANY_SITE = (b"access-control-allow-origin", b"*")
_ALLOWED = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b"authorization, *"),  # which no wildcard stands for
    (b"access-control-max-age", b"600"),
)
_READABLE = (b"access-control-expose-headers", b"*")


def is_preflight(scope: Scope, headers: Headers) -> bool:
    """Whether a browser asks what a page may do, before it does what the page wants. It sends no key."""
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


async def answer_preflight(keyed: bool, send: Send) -> None:
    """Answer, beside what `shared_with_pages` adds; raises `ApiError` (403) where there are no keys."""
    if not keyed:
        message = "this server has no keys, so pages of other sites may not use it; start it with --api-key"
        raise ApiError("forbidden_origin", message, status=403)
    await send({"type": "http.response.start", "status": 204, "headers": list(_ALLOWED)})
    await send({"type": "http.response.body", "body": b""})


def shared_with_pages(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers by which a page may read the answer to a request with `headers`."""
    return [_ANY_SITE, _READABLE] if "origin" in headers else []
