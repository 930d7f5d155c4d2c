"""What a client may call its request, on every ingress: a label that is echoed and logged, and means nothing here."""

from __future__ import annotations

import re

# On answers, for the guard around Serve's proxy: what the server calls the request.
SERVERS_NAME = "x-squadron-request-id"
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


def is_client_id(text: str) -> bool:
    """Whether `text` is 1 to 128 visible ASCII characters: nothing that could forge a line of a log or a header."""
    return _CLIENT_ID.fullmatch(text) is not None
