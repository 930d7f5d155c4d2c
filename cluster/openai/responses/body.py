"""The response object: what was asked for, said again, and what came of it.

Source: OpenAI API reference, "the response object".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cluster.errors import ApiError
from cluster.openai.deltas import Usage
from cluster.openai.responses.parse import Asked

Item = dict[str, Any]


class ResponseBody:
    """Makes the bodies of one response as it goes on."""

    def __init__(self, asked: Asked, model_id: str) -> None:
        self._asked = asked
        self._head = {
            "id": asked.call.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model_id,
        }

    def running(self) -> dict[str, Any]:
        """Return the body before anything is known."""
        return self._body("in_progress", [], None)

    def ended(self, items: Sequence[Item], usage: dict[str, Any], cut: bool) -> dict[str, Any]:
        """Return the last body. cut: the output reached its limit."""
        body = self._body("incomplete" if cut else "completed", items, usage)
        if cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        return body

    def failed(self, items: Sequence[Item], error: ApiError) -> dict[str, Any]:
        """Return the last body of a response that failed after its start."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return self._body("failed", items, None) | {"error": {"code": code, "message": error.message}}

    def _body(self, status: str, items: Sequence[Item], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(items),
            "usage": usage,
            **self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        """What the client sent, with defaults filled in."""
        fields, params = self._asked.fields, self._asked.call.params
        wanted = fields.text.format if fields.text else None
        return {
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}},
            "tools": [tool.model_dump() for tool in fields.tools or ()],
            "tool_choice": _choice(fields.tool_choice),
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
            "top_logprobs": fields.top_logprobs or 0,
            "truncation": "disabled",
            "metadata": fields.metadata or {},
            "user": fields.user,
            "safety_identifier": fields.safety_identifier,
            "prompt_cache_key": fields.prompt_cache_key,
            "background": False,
            "store": False,
            "previous_response_id": None,
            "service_tier": "default",
        }


def usage_body(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """Return the usage of a response. Nothing is billed for what is written to the cache, so it is told as 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _choice(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump() if choice is not None else "auto"
