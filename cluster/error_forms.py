"""The forms in which clients read errors: OpenAI's, and on the routes of Anthropic's API that one's.

Both say all that `ApiError.body` says, so that an ingress reads them alike.
Source: OpenAI API reference, error object; Anthropic API reference, "errors" and "streaming messages".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import json
from starlette.datastructures import Headers

from cluster.errors import ApiError

MESSAGES, COUNT_TOKENS, MODELS = "/v1/messages", "/v1/messages/count_tokens", "/v1/models"
VERSION_HEADER = "anthropic-version"
# Anthropic's types of errors that have another one of OpenAI's.
_BY_CODE = {
    "body_too_large": "request_too_large",
    "deadline_exceeded": "timeout_error",
    "request_timeout": "timeout_error",
}


class ErrorForm:
    """OpenAI's form. error: what `ApiError.body` has under `error`."""

    def body(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON body of an answer that is an error."""
        return {"error": dict(error)}

    def frame(self, error: Mapping[str, Any]) -> bytes:
        """Return the event that ends a stream which failed after its start; nothing follows it."""
        return b"data: " + json.encode(self.body(error)) + b"\n\n"


class MessagesForm(ErrorForm):
    """Anthropic's form."""

    def body(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """See `ErrorForm.body`."""
        told = {**error, "type": _type_of(error)}
        return {"type": "error", "error": told, "request_id": error.get("request_id")}

    def frame(self, error: Mapping[str, Any]) -> bytes:
        """See `ErrorForm.frame`."""
        return b"event: error\n" + super().frame(error)


OPENAI_FORM, MESSAGES_FORM = ErrorForm(), MessagesForm()


def form_of(scope: Mapping[str, Any]) -> ErrorForm:
    """Return the form in which the route of a request (ASGI) gives its errors.

    Models are told in the form of the API whose version the client names, and so is what is wrong with them. A path
    may have a prefix (`--root-path`).
    """
    path = f"{scope['path']}/"
    if f"{MESSAGES}/" in path:
        return MESSAGES_FORM
    by_version = f"{MODELS}/" in path and VERSION_HEADER in Headers(scope=scope)  # type: ignore[arg-type]
    return MESSAGES_FORM if by_version else OPENAI_FORM


def error_of(error: ApiError) -> dict[str, Any]:
    """Return what an error says, in no form yet."""
    said: dict[str, Any] = error.body()["error"]
    return said


def _type_of(error: Mapping[str, Any]) -> str:
    code, kind = str(error.get("code")), str(error.get("type"))
    if code in _BY_CODE:
        return _BY_CODE[code]
    if kind != "server_error":
        return kind
    return "overloaded_error" if error.get("retryable") else "api_error"
