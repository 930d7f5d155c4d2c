"""Rows that are requests, as OpenAI's Batch API takes them.

Source: https://platform.openai.com/docs/api-reference/batch/request-input
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.batch.rows import URLS, SourceRow, Task, brief, quoted

FIELDS = ("custom_id", "method", "url", "body")


def looks_openai(fields: Mapping[str, Any]) -> bool:
    """Whether a row is meant as a request: it has a body that is an object, and another field of a request."""
    return isinstance(fields.get("body"), Mapping) and any(name in fields for name in FIELDS if name != "body")


def default_id(number: int) -> str:
    """Return the id of a row that brings none. number: its place in the input, from 0."""
    return f"row-{number + 1}"


@dataclass(frozen=True, slots=True)
class _Wrong:
    problem: str
    param: str


class OpenAIRows:
    """Tasks of requests. model: for bodies that name none."""

    has_ids = True
    tells_places = False  # whoever made the custom_ids knows

    def __init__(self, model: str) -> None:
        self._model = model

    def custom_id(self, row: SourceRow) -> str | None:
        """Return the field; None where it is missing, empty or no text."""
        value = (row.fields or {}).get("custom_id")
        return value if isinstance(value, str) and value else None

    def without_id(self, row: SourceRow) -> str:
        """See `TaskMaker.without_id`."""
        value = (row.fields or {}).get("custom_id")
        if value is None:
            return "has no custom_id"
        return f"has the custom_id {quoted(value)}, which must be text and not empty: 'row-1' is one"

    def task(self, row: SourceRow) -> Task:
        """Return the request; anything in it that is not of the format is the row's problem."""
        custom_id = self.custom_id(row) or default_id(row.number)
        if row.fields is None:
            return Task(row.number, custom_id, "", {}, row.problem)
        wrong = _wrong(row.fields)
        if wrong is not None:
            return Task(row.number, custom_id, "", {}, wrong.problem, wrong.param)
        body = row.fields["body"]
        if body.get("model") is None:
            body = {**body, "model": self._model}
        return Task(row.number, custom_id, row.fields["url"], body)


def _wrong(fields: Mapping[str, Any]) -> _Wrong | None:
    extra = next((name for name in fields if name not in FIELDS), None)
    if extra is not None:
        return _Wrong(f"{quoted(extra)} is no field of a batch request, which has {', '.join(FIELDS)}", brief(extra))
    if fields.get("method") != "POST":
        return _Wrong(f"method must be 'POST', not {_shown(fields, 'method')}", "method")
    if fields.get("url") not in URLS:
        return _Wrong(f"url must be one of {', '.join(URLS)}, not {_shown(fields, 'url')}", "url")
    body = fields.get("body")
    if not isinstance(body, Mapping):
        return _Wrong(f"body must be an object with the request's parameters, not {_shown(fields, 'body')}", "body")
    if body.get("stream") not in (None, False):
        return _Wrong("stream must be false in a batch: an answer is written when it is whole", "body.stream")
    return None


def _shown(fields: Mapping[str, Any], name: str) -> str:
    """Return a field's value as a message can hold it."""
    return quoted(fields[name]) if name in fields else "missing"
