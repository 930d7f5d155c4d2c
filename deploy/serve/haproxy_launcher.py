"""Starts HAProxy in Ray Serve's place, with a configuration that is bounded and reports the true state.

    python -IS haproxy_launcher.py BINARY -db -f CONFIGURATION ...

Ray Serve writes the configuration and starts what `RAY_SERVE_HAPROXY_BINARY_PATH` names: a script that comes here.
What it leaves no setting for is rewritten: where statistics and metrics listen (every interface), what clients get
where no router answers (a bare 500, or a 404 before the first router is known), and that `/-/routes` tells everybody
which apps there are. Imports nothing but the standard library, so that a reload costs 30 ms.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOCAL_SECTIONS = ("frontend prometheus", "listen stats")  # for people and scrapers on this machine
_ERROR = (
    '{{"error":{{"message":"{message}","type":"{type}","param":null,"code":"{code}",'
    '"retryable":{retryable},"request_id":"%[var(txn.squadron_id),json(utf8s)]"}}}}'
)
_NAME = 'hdr x-request-id "%[var(txn.squadron_id)]"'
_HEADERS = f"hdr retry-after 1 {_NAME}"
LOST = _ERROR.format(
    code="router_lost",
    type="server_error",
    retryable="true",
    message="the router was lost before the answer was complete; send the request again",
)
NO_ROUTER = _ERROR.format(
    code="no_router",
    type="server_error",
    retryable="true",
    message="no router serves requests now; send the request again",
)
# Without an apostrophe, which would end HAProxy's string.
NOT_THERE = _ERROR.format(
    code="not_found",
    type="not_found_error",
    retryable="false",
    message="there is nothing at /-/routes; /openapi.json lists what there is, /ui is a page",
)
# Seconds in which a client must have sent the headers of a request; Serve bounds none, and each connection counts.
HEADERS_TIMEOUT = 20
# 502: the router closed the connection before it answered; 503: none is there; 504: none answered in time.
ERRORS = {502: LOST, 503: NO_ROUTER, 504: LOST}
NAMING = (
    "    unique-id-format %[uuid]\n"
    "    http-request set-header x-request-id %[unique-id] if !{ req.hdr(x-request-id) -m found }\n"
    "    http-request set-var(txn.squadron_id) req.hdr(x-request-id)\n"
)


def rewritten(text: str) -> str:
    """Return Serve's configuration with ours in it. Raises `ValueError` naming what is not as Ray 2.60 writes it."""
    for section in LOCAL_SECTIONS:
        text = _replace(rf"(^{section}\n\s+bind )\*?:", "127.0.0.1:", text, f"bind of {section!r}")
    for status, error in ERRORS.items():
        ours = f"http-error status {status} {_content(error)}"
        text = _replace(rf"(^\s+)errorfile {status} .*$", ours, text, f"errorfile {status}")
    timeout = f"    timeout http-request {HEADERS_TIMEOUT}s\n"
    text = _replace(r"(^defaults\n\s+mode http\n)", timeout, text, "mode of 'defaults'")
    text = _replace(r"(^frontend http_frontend\n\s+bind .*\n)", NAMING, text, "bind of 'frontend http_frontend'")
    # A router would decode the path, and answer as well.
    text = _replace(r"(^\s+acl routes path)( -i /-/routes)$", ",url_dec -i /-/routes", text, "acl routes")
    closed = f"404 content-type application/json lf-string '{NOT_THERE}' {_NAME} if routes"
    text = _replace(r"(^\s+http-request return status ).* if routes$", closed, text, "answer of /-/routes")
    unknown = f"    http-request return status 503 {_content(NO_ROUTER)}"
    return _replace(r"(^backend default_backend\n).*return status 404.*$", unknown, text, "default_backend")


def main() -> None:
    """Rewrite, and become HAProxy. It dies with the process that asked for it, or its port would stay taken."""
    binary, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    path = Path(arguments[arguments.index("-f") + 1])
    try:
        path.write_text(rewritten(path.read_text()))
    except ValueError as error:
        # As Serve wants it, then: `squadron serve` looks what listens where, and warns.
        print(error, file=sys.stderr)
    os.execv(binary, [binary, *arguments])  # noqa: S606  # no shell is wanted: Ray waits for this very process


def _content(error: str) -> str:
    return f"content-type application/json lf-string '{error}' {_HEADERS}"


def _replace(pattern: str, new: str, text: str, what: str) -> str:
    """Put `new` after the pattern's group, in place of the rest of what it matches."""
    replaced, count = re.subn(pattern, lambda match: match[1] + new, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"this Ray writes another configuration of HAProxy than 2.60 does: no {what} to rewrite")
    return replaced


if __name__ == "__main__":
    main()
