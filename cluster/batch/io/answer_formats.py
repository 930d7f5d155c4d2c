"""A row's result in the two styles of an output: columns beside those of the input, or OpenAI's lines.

Source of the lines: https://platform.openai.com/docs/api-reference/batch/request-output
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from cluster.batch.io.manifest import RESULT_COLUMNS, details_column
from cluster.batch.ledger.records import Job, RowDone

# Told by the other columns or of no use beside them; all else of an answer is a detail.
PLAIN_OF_BODY = frozenset({"id", "object", "created", "model", "choices", "data", "usage", "system_fingerprint"})
PLAIN_OF_USAGE = frozenset({"prompt_tokens", "completion_tokens", "total_tokens"})
PLAIN_OF_CHOICE = frozenset({"index", "text", "message", "finish_reason"})
PLAIN_OF_MESSAGE = frozenset({"role", "content"})

_decode = msgspec.json.Decoder(dict[str, Any]).decode
ID_BYTES = 12
_encode = msgspec.json.Encoder().encode


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
    columns = dict(zip((answer_column, *RESULT_COLUMNS), values, strict=True))
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


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class _Line(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


class _PlacedLine(_Line, frozen=True):
    place: str


class _ErrorBody(msgspec.Struct, frozen=True):
    error: dict[str, object] = msgspec.field(default_factory=dict)


class OpenAILines:
    """Makes the lines of a job's rows; the same job, the same lines."""

    def __init__(self, job: Job) -> None:
        self._digest = job.digest

    def answer(self, done: RowDone, custom_id: str) -> bytes:
        """Return the line of a row that has an answer."""
        number = self._number(done.row)
        return _encode(_Line(f"batch_req_{number}", custom_id, _response(done, number), None)) + b"\n"

    def error(self, done: RowDone, custom_id: str, place: str | None = None) -> bytes:
        """Return the line of a row that ended in an error. place: where the row lies; None = it is not written.

        What HTTP says is in the response, with its status; of a row that was never asked there is an error alone.
        """
        number = self._number(done.row)
        response, error = _response(done, number) if done.status else None, None
        if response is None:
            message = msgspec.json.decode(done.body, type=_ErrorBody).error.get("message", "")
            error = _Error(done.code, str(message))
        line = _Line(f"batch_req_{number}", custom_id, response, error)
        told = line if place is None else _PlacedLine(line.id, custom_id, response, error, place)
        return _encode(told) + b"\n"

    def _number(self, row: int) -> str:
        return blake2b(f"{self._digest}:{row}".encode(), digest_size=ID_BYTES).hexdigest()


def _response(done: RowDone, number: str) -> _Response:
    # A line holds one row whatever its body looks like.
    body = msgspec.json.format(done.body, indent=-1) if b"\n" in done.body else done.body
    return _Response(done.status, f"req_{number}", msgspec.Raw(body))
