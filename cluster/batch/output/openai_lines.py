"""Lines of the output and error files of OpenAI's Batch API.

Source: https://platform.openai.com/docs/api-reference/batch/request-output
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from cluster.batch.ledger.records import Job, RowDone

ID_BYTES = 12
_encode = msgspec.json.Encoder().encode


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
        """Return the line of a row that ended in an error. place: where the row lies; None = it is not told.

        What HTTP tells is in the response, with its status; of a row that was never asked there is an error alone.
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
