"""What a client may call its request and its conversation, on every ingress: checked alike, whichever it comes by."""

from __future__ import annotations

import re

from cluster.errors import ApiError

# On answers, for the guard around Serve's proxy: what the server calls the request.
SERVERS_NAME = "x-squadron-request-id"
SESSION_HEADER = "x-session-id"
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SESSION = re.compile(r"[\x21-\x7e]{1,256}")


def is_client_id(text: str) -> bool:
    """Whether `text` is 1 to 128 visible ASCII characters: nothing that could forge a line of a log or a header."""
    return _CLIENT_ID.fullmatch(text) is not None


def checked_session(value: str) -> str:
    """Return what a client sent as `x-session-id` ("" = nothing); raises `ApiError` for what is none."""
    if value and not _SESSION.fullmatch(value):
        message = f"{SESSION_HEADER} must be 1 to 256 printable ASCII characters without spaces, such as a UUID"
        raise ApiError("invalid_request", message, param=SESSION_HEADER)
    return value
