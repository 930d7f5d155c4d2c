"""The OpenAI front end with a store of files and batches behind it."""

from __future__ import annotations

from pathlib import Path

from cluster.admission.key_file import parse_keys
from cluster.admission.keys import FixedKeys, KeyRing
from cluster.admission.tenants import Tenancy
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from tests.openai_app import app_for, saying

TENANTS = "- {key: sk-a, tenant: a}\n- {key: sk-b, tenant: b}"
LINES = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n' * 3
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}
BOUNDARY = "the-boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def storing_app(model, folder: Path | str, max_file_bytes: int = 1 << 20, on_created=None, **changes):
    """The app around a store in `folder`."""
    store = Store(open_root(str(folder)), max_file_bytes, on_created)
    return app_for(saying(model, "ok"), model, store=store, **changes)


def two_tenants() -> Tenancy:
    """Keys sk-a and sk-b, of the tenants a and b."""
    return Tenancy(FixedKeys(KeyRing(parse_keys(TENANTS, "keys.yaml"))))


def form(*parts: bytes, end: bytes = f"--{BOUNDARY}--\r\n".encode()) -> bytes:
    """A multipart body of finished parts."""
    return b"".join([f"--{BOUNDARY}\r\n".encode() + part + b"\r\n" for part in parts]) + end


def part(name: str, content: bytes, more: str = "", headers: str = "") -> bytes:
    """One part. more: parameters after its name; headers: further lines."""
    head = f'Content-Disposition: form-data; name="{name}"{more}\r\n{headers}\r\n'
    return head.encode() + content


def upload_form(content: bytes = LINES, filename: str = "in.jsonl", purpose: bytes = b"batch") -> bytes:
    """The body of an upload as clients send it."""
    return form(part("purpose", purpose), part("file", content, f'; filename="{filename}"'))
