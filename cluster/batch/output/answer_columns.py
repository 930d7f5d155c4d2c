"""An answer as columns: its text, why it ended, what it took, and whatever else it tells."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from cluster.batch.ledger.records import RowDone
from cluster.batch.output.spec import FIGURES, details_column

# Told by the other columns or of no use beside them; all else of an answer is a detail.
PLAIN_OF_BODY = frozenset({"id", "object", "created", "model", "choices", "data", "usage"})
PLAIN_OF_USAGE = frozenset({"prompt_tokens", "completion_tokens", "total_tokens"})
PLAIN_OF_CHOICE = frozenset({"index", "text", "message", "finish_reason"})
PLAIN_OF_MESSAGE = frozenset({"role", "content"})

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def answer_columns(done: RowDone, answer_column: str) -> dict[str, Any]:
    """Return the columns that a row's answer adds.

    The answer is text: of a chat, of a completion, or where there is none the JSON of tool calls. Of embeddings it is
    the vector. Of several choices, answer and finish_reason are lists. Whatever else the body holds (tool calls
    beside text, reasoning, log-probabilities) is in a column of details: name -> value; of several choices those of
    each are in its list `choices`. An answer that has none lacks that column.
    """
    body = _decode(done.body)
    choices, vectors = body.get("choices") or [], body.get("data") or []
    answers = [_text(choice) for choice in choices] or [one["embedding"] for one in vectors]
    reasons = [choice.get("finish_reason") for choice in choices]
    values = (_one_or_all(answers), _one_or_all(reasons), done.prompt_tokens, done.output_tokens)
    columns = dict(zip((answer_column, *FIGURES), values, strict=True))
    details = _details(body, choices)
    return {**columns, details_column(answer_column): details} if details else columns


def _text(choice: Mapping[str, Any]) -> Any:
    message = choice.get("message")
    if message is None:
        return choice.get("text")
    if _calls_are_the_answer(message):
        return msgspec.json.encode(message["tool_calls"]).decode()
    return message.get("content")


def _calls_are_the_answer(message: Mapping[str, Any]) -> bool:
    return message.get("content") is None and bool(message.get("tool_calls"))


def _details(body: Mapping[str, Any], choices: list[Mapping[str, Any]]) -> dict[str, Any]:
    of_choices = [_of_choice(choice) for choice in choices]
    details = {**_others(body.get("usage") or {}, PLAIN_OF_USAGE), **_others(body, PLAIN_OF_BODY)}
    if len(of_choices) == 1:
        return {**details, **of_choices[0]}
    return {**details, "choices": of_choices} if any(of_choices) else details


def _of_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    plain = PLAIN_OF_MESSAGE | {"tool_calls"} if _calls_are_the_answer(message) else PLAIN_OF_MESSAGE
    return {**_others(message, plain), **_others(choice, PLAIN_OF_CHOICE)}


def _others(fields: Mapping[str, Any], plain: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in plain and value is not None}


def _one_or_all(values: list[Any]) -> Any:
    if not values:
        return None
    return values[0] if len(values) == 1 else values
