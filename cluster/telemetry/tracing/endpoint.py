"""Where spans go: a collector that speaks OTLP over HTTP, or a file."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

EXAMPLES = "http://localhost:4318/v1/traces, or file:///tmp/traces.jsonl"
OTLP_PATH = "/v1/traces"  # source: OTLP 1.x, the default path of traces over HTTP


def checked_endpoint(url: str) -> str:
    """Return the URL, with OTLP's path where a collector's has none. Raises `ValueError` that says what works."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"must be a URL such as {EXAMPLES}") from None
    if parts.scheme == "file" and parts.path.startswith("/") and parts.netloc in ("", "localhost"):
        if parts.path.endswith("/"):
            raise ValueError("must name a file, such as file:///tmp/traces.jsonl")
        if parts.query or parts.fragment or "\0" in unquote(parts.path):
            raise ValueError(
                "must be the path of a file with ? as %3F and # as %23, such as file:///tmp/traces.jsonl"
            )
        return url
    if parts.scheme in ("http", "https") and parts.hostname and port != 0:
        return url if parts.path not in ("", "/") else urlunsplit(parts._replace(path=OTLP_PATH))
    if parts.scheme == "grpc":
        raise ValueError(f"must be OTLP over HTTP, not gRPC: {EXAMPLES}; collectors take it at port 4318")
    raise ValueError(f"must be a URL such as {EXAMPLES}")


def file_of(url: str) -> Path | None:
    """Return the file that a checked endpoint names, None for a collector."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
