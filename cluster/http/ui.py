"""`/ui`: one HTML file, read once, with a policy that lets nothing run or load but itself, nor be sent elsewhere."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH = "/ui"
_INLINE = re.compile(r"<(script|style)\b[^>]*>(.*?)</\1>", re.DOTALL)


def ui_route() -> Route:
    """Return the route of the page.

    Where keys are set, it needs one like all routes: the browser asks its user, and sends it with what the page asks.
    """
    page = page_html()
    headers = page_headers(page)

    async def show(_: Request) -> Response:
        return Response(page, headers=headers, media_type="text/html")

    return Route(PATH, show)


def page_html() -> str:
    """Return the page's text. It names no address but relative ones, so it works below any mount point."""
    return files(__package__).joinpath("ui.html").read_text(encoding="utf-8")


def page_headers(page: str) -> dict[str, str]:
    """Return the headers of a page whose styles and scripts are inline.

    Its own ones are allowed by their hashes, which no text that a model writes can have; requests go to the page's
    own origin only. Source: W3C Content Security Policy level 3, Trusted Types.
    """
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(page, "script"),
        "style-src": _hashes(page, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "content-security-policy": "; ".join([f"{name} {value}" for name, value in policy.items()]),
        "cache-control": "no-cache",  # a new version's page must not wait for a browser's cache
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }


def _hashes(page: str, tag: str) -> str:
    texts = [match[2] for match in _INLINE.finditer(page) if match[1] == tag]
    return " ".join([f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts]) or "'none'"
