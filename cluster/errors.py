"""The typed error that every ingress (HTTP, gRPC, batch) gives, and that of a replica or router that cannot start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError, InvalidRequestError

STATUS_BY_CODE = {
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "invalid_api_key": 401,
    "forbidden_host": 403,
    "forbidden_origin": 403,
    "permission_denied": 403,
    "rate_limit_exceeded": 429,
    "overloaded": 429,
    "no_replica": 503,
    "asleep": 503,
    "replica_lost": 503,
    "router_lost": 503,
    "no_router": 503,
    "model_changed": 503,
    "out_of_memory": 503,
    "shutting_down": 503,
    "internal_error": 500,
    "prompt_logprobs_out_of_memory": 500,
    "request_quarantined": 500,
    "deadline_exceeded": 504,
}
_LINE = re.compile(r"^\S*ReplicaStartError: squadron: (?P<kind>\w+): (?P<flag>\w*): (?P<message>.*)$", re.MULTILINE)


class ApiError(Exception):
    """One request failed: `{code, message, type, param, retryable, request_id}` in OpenAI's error shape.

    `status` is the HTTP status; `retry_after` (seconds) goes out as `Retry-After` with 429 and 503.
    Source: OpenAI API reference, error object; FAULTS ("one typed error").
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        retryable: bool | None = None,
        retry_after: int | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status = STATUS_BY_CODE.get(code, 400) if status is None else status
        self.retryable = self.status in (429, 503) if retryable is None else retryable
        self.retry_after = retry_after if retry_after is not None else (1 if self.status in (429, 503) else None)
        self.request_id = request_id

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 403:
            return "permission_error"
        if self.status == 404:
            return "not_found_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """Return the JSON body: `{"error": {...}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                "retryable": self.retryable,
                "request_id": self.request_id,
            }
        }


def as_api_error(error: ApiError | InvalidRequestError) -> ApiError:
    """Return the error that a client sees; the engine's refusal of its request is a 400."""
    if isinstance(error, ApiError):
        return error
    return ApiError(error.code, str(error), param=error.param, status=400)


class ReplicaStartError(RuntimeError):
    """Raised by a replica's constructor; its text is the one line `squadron: KIND: FLAG: MESSAGE`.

    FLAG is the setting that mends it, empty where the error names none. Starting again would fail in the same way.
    """

    @classmethod
    def of(cls, error: Exception, model: str = "") -> ReplicaStartError:
        """Wrap an error of the engine (`ConfigError`, `CheckpointError`, `ShardingError`, ...).

        model: which could not start, where there are several.
        """
        flag = error.flag if isinstance(error, ConfigError) else ""
        message = " ".join(f"model {model}: {error}".split() if model else str(error).split())
        return cls(f"squadron: {type(error).__name__}: {flag}: {message}")


@dataclass(frozen=True, slots=True)
class StartFailure:
    """What a `ReplicaStartError` said: the kind of error, the setting (may be empty), one sentence."""

    kind: str
    flag: str
    message: str


def find_start_failure(status: str) -> StartFailure | None:
    """Find the line of a `ReplicaStartError` in Serve's status message, which is a whole traceback."""
    found = _LINE.search(status)
    return StartFailure(found["kind"], found["flag"], found["message"].strip()) if found else None
