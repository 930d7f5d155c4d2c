"""A row of a batch: as it stands in the input, and as the task that it sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS)
MAX_TOLD = 80  # characters of what an input holds, in a message


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of the input.

    number: its place in the whole input, from 0. place: where it stands, for people: `data.jsonl:7`. fields: its
    columns; None where it could not be read, and `problem` says why. raw: its bytes, alike in every reading. line: of
    its file, from 1, where that has lines; None elsewhere. prompt_column: which column is the prompt, where the
    format tells it; "" elsewhere.
    """

    number: int
    place: str
    fields: Mapping[str, Any] | None
    raw: bytes
    problem: str = ""
    line: int | None = None
    prompt_column: str = ""


class InputSource(Protocol):
    """The rows of an input, in one order that never changes; can be walked any number of times, in little memory."""

    def rows(self) -> Iterator[SourceRow]:
        """Yield all rows from the first on. Raises `InputError` when the input cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """What a row asks for. `problem`: why nothing can be asked, "" if all is well; `param`: the field to blame."""

    row: int
    custom_id: str
    url: str
    body: Mapping[str, Any]
    problem: str = ""
    param: str | None = None


def brief(text: str) -> str:
    """Return text of the input as a message or a field's name can hold it: no more than its beginning."""
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]}..."


def quoted(value: object) -> str:
    """Return a value of the input as Python writes it, no more than the beginning."""
    return brief(repr(value[: MAX_TOLD + 1] if isinstance(value, str | bytes) else value))
