"""What browsers are told of the sites whose pages may use a server (`Sites`).

Source: WHATWG Fetch, "CORS protocol".
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope, Send

from cluster.errors import ApiError
from cluster.http.sites import Sites

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


async def answer_preflight(sites: Sites, headers: Headers, send: Send) -> None:
    """Answer, beside what `shared_with_pages` adds; raises `ApiError` (403) where the site may not."""
    if not sites.lets_in(headers["origin"]):
        message = "pages of other sites may not use this server; start it with --api-key, or --allowed-origins"
        raise ApiError("forbidden_origin", message)
    await send({"type": "http.response.start", "status": 204, "headers": list(_ALLOWED)})
    await send({"type": "http.response.body", "body": b""})


def shared_with_pages(sites: Sites, headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers by which a page may read the answer to a request with `headers`."""
    origin = headers.get("origin")
    if origin is None or not sites.lets_in(origin):
        return []
    if sites.lets_all_in:
        return [_ANY_SITE, _READABLE]
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin"), _READABLE]
