"""An answer as columns: its text, why it ended, and what it took."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.batch.ledger.records import RowDone
from cluster.batch.output.spec import FIGURES


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Vector(msgspec.Struct, frozen=True):
    embedding: list[float] | str


class _Body(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    data: list[_Vector] = []


_decode = msgspec.json.Decoder(_Body).decode


def answer_columns(done: RowDone, answer_column: str) -> dict[str, Any]:
    """Return the columns that a row's answer adds.

    The answer is text: of a chat, of a completion, or where there is none the JSON of tool calls. Of embeddings it is
    the vector. Of several choices, answer and finish_reason are lists.
    """
    body = _decode(done.body)
    answers: list[Any] = [_text(choice) for choice in body.choices] or [one.embedding for one in body.data]
    reasons = [choice.finish_reason for choice in body.choices]
    values = (_one_or_all(answers), _one_or_all(reasons), done.prompt_tokens, done.output_tokens)
    return dict(zip((answer_column, *FIGURES), values, strict=True))


def _text(choice: _Choice) -> str | None:
    if choice.message is None:
        return choice.text
    if choice.message.content is None and choice.message.tool_calls:
        return msgspec.json.encode(choice.message.tool_calls).decode()
    return choice.message.content


def _one_or_all(values: list[Any]) -> Any:
    if not values:
        return None
    return values[0] if len(values) == 1 else values
