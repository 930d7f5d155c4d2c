"""What makes two jobs different ones, in words for whoever runs a command again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.batch.ledger.records import Job
from cluster.batch.rows import MAX_TOLD
from cluster.config import flag

UNSET = "not set"
SHARED = 20  # characters of what two long values have in common that are told before they part
# Parts of a job whose values, digests mostly, tell people nothing.
CHANGED = {
    "input_digest": "the input was changed",
    "fingerprint": "the model's weights, dtype or quantization were changed",
    "prompts": "the tokenizer or the chat template was changed",
}
GROUPS = ("columns",)  # settings that hold settings
FLAGS = {"kind": "format"}  # settings whose flag has another name


def difference(first: Job, job: Job) -> str | None:
    """Return what of `first` is not so in `job`: the flag and both values, shortened. None where they are equal."""
    if first.digest == job.digest:
        return None
    was, now = _parts(first), _parts(job)
    name = next((one for one in {**was, **now} if was.get(one) != now.get(one)), None)
    if name is None:
        return f"it was begun by Squadron {first.version}, which tells settings in another way than {job.version}"
    return CHANGED.get(name) or f"{flag(FLAGS.get(name, name))} {_told(was.get(name), now.get(name))}"


def _parts(job: Job) -> dict[str, Any]:
    """Return what decides a job, by name."""
    parts = {"input_digest": (job.input_digest, job.rows), "model": job.model, "fingerprint": job.fingerprint}
    return {**parts, **_settings(job.settings)}


def _settings(text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, Mapping):
        return {"settings": text}
    settings = dict(found)
    for group in GROUPS:
        inner = settings.pop(group, None)
        settings |= inner if isinstance(inner, Mapping) else {}
    return settings


def _told(was: Any, now: Any) -> str:
    one, other = _text(was), _text(now)
    longest = max(len(one), len(other))
    shared = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    begin = max(0, shared - SHARED) if longest > MAX_TOLD else 0
    return f"was {_shown(was, one, begin)} and is {_shown(now, other, begin)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _shown(value: Any, text: str, begin: int) -> str:
    """Return a value from one character on, quoted unless it is a number or a word."""
    if value is None:
        return UNSET
    if not isinstance(value, str | Mapping | list):
        return text
    end = begin + MAX_TOLD
    return repr(f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}")
