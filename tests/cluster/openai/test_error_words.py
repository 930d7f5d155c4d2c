"""Errors say what clients look for: status, type, code, param and words, held beside vLLM's and OpenAI's.

Each case names what clients take the error for. `taken_for` reads errors as they do: litellm, langchain, Cline,
OpenHands, Codex and aider match on words of the whole body, the packages of OpenAI and Anthropic on the status.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.admission.keys import FixedKeys
from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.openai.parsers.tool_formats import HermesParser
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

KEY = "sk-right"
PEER = "SQUADRON_VLLM_PACKAGE"  # the folder of an installed vLLM, whose sources are to have the words below
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, MESSAGES, SCORE = "/v1/embeddings", "/v1/messages", "/v1/score"
SAY = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
LONG = "word " * 2000

# What clients take errors for: what they do next differs.
CONTEXT, RATE, AUTH, MISSING, BAD, GONE, TIMEOUT, BUSY, FAILED = (
    "context", "rate limit", "key", "not found", "bad request", "previous response", "timeout", "unavailable",
    "failed",
)  # fmt: skip
CONTEXT_WORDS = (
    r"this model's maximum context length is",  # litellm, vLLM's own clients
    r"context_length_exceeded",  # langchain, Codex, aider, Roo
    r"please reduce the length of",  # OpenHands, aider
    r"prompt is too long",  # Claude Code, OpenHands, litellm
    r"\bcontext\s*(?:length|window)\b",  # Cline
    r"\bmaximum\s*context\b",  # Cline
    r"\b(?:input\s*)?tokens?\s*exceed",  # Cline
    r"\btoo\s*many\s*tokens?\b",  # Cline
)


def taken_for(status: int, text: str) -> str:
    """What a client takes an error for, by the words of its body first, as most do, then by its status."""
    said = text.lower()
    if re.search(r"rate[\s_\-]*limit", said):
        return RATE
    if any(re.search(words, said) for words in CONTEXT_WORDS):
        return CONTEXT
    if "previous_response_not_found" in said:
        return GONE
    if "incorrect api key" in said or "invalid_api_key" in said:
        return AUTH
    by_status = {401: AUTH, 403: AUTH, 404: MISSING, 408: TIMEOUT, 429: RATE, 503: BUSY, 504: TIMEOUT, 529: BUSY}
    return by_status.get(status, FAILED if status >= 500 else BAD)


@dataclass(frozen=True)
class Case:
    """One error. words: what ours says, in any case of letters. vllm / openai: what theirs say to the same.

    theirs: (status, code or type, words) as a reader finds it with OpenAI; None = OpenAI has no such field or route.
    vllm: words of vLLM 0.32's sources; "" = it takes the request, or has no such route.
    """

    name: str
    body: Any
    status: int
    code: str
    param: str | None
    words: tuple[str, ...]
    kind: str = BAD
    path: str = CHAT
    vllm: str = ""
    openai: tuple[int, str, str] | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def chat(name: str, more: dict[str, Any], code: str, param: str, *words: str, **kinds: Any) -> Case:
    """A chat that is refused with 400."""
    return Case(name, {"model": MODEL} | SAY | more, 400, code, param, words, **kinds)


INVALID, TYPE, REQUIRED = "invalid_value", "invalid_type", "missing_required_parameter"
UNKNOWN, UNSUPPORTED = "unknown_parameter", "unsupported_parameter"
TOO_LONG = "context_length_exceeded"
CASES = (
    # ---- keys, models, routes
    Case("no key", SAY, 401, "invalid_api_key", None, ("no API key",), AUTH, vllm="Unauthorized",
         openai=(401, "invalid_request_error", "You didn't provide an API key"), headers={"authorization": ""}),
    Case("wrong key", SAY, 401, "invalid_api_key", None, ("Incorrect API key provided",), AUTH, vllm="Unauthorized",
         openai=(401, "invalid_api_key", "Incorrect API key provided"), headers={"authorization": "Bearer sk-x"}),
    Case("wrong key, Anthropic's way", {}, 401, "invalid_api_key", None, ("API key",), AUTH, MESSAGES,
         headers={"authorization": "", "x-api-key": "sk-x"}),
    Case("unknown model", {"model": "nope"} | SAY, 404, "model_not_found", "model",
         ("The model `nope` does not exist",), MISSING, vllm="The model `{request.model}` does not exist.",
         openai=(404, "model_not_found", "The model `nope` does not exist or you do not have access to it.")),
    Case("unknown model of completions", {"model": "nope", "prompt": "a"}, 404, "model_not_found", "model",
         ("does not exist",), MISSING, COMPLETIONS, openai=(404, "model_not_found", "does not exist")),
    Case("unknown model of embeddings", {"model": "nope", "input": "a"}, 404, "model_not_found", "model",
         ("does not exist",), MISSING, EMBEDDINGS, openai=(404, "model_not_found", "does not exist")),
    Case("unknown model, Anthropic's way", {"model": "nope", "max_tokens": 4} | SAY, 404, "model_not_found", "model",
         ("not_found_error", "nope"), MISSING, MESSAGES),
    Case("unknown model of a card", None, 404, "model_not_found", "model", ("does not exist",), MISSING,
         "/v1/models/nope", vllm="The model `{model_name}` does not exist.",
         openai=(404, "model_not_found", "The model 'nope' does not exist"), method="GET"),
    Case("no such route", {}, 404, "not_found", None, ("/openapi.json",), MISSING, "/v1/nope",
         openai=(404, "invalid_request_error", "Invalid URL (POST /v1/nope)")),
    Case("wrong method", None, 405, "method_not_allowed", None, ("use POST",), BAD, CHAT, method="GET",
         openai=(405, "method_not_supported", "Not allowed to GET on /v1/chat/completions.")),
    # ---- more than the context holds
    chat("long chat", {"messages": [{"role": "user", "content": LONG}]}, TOO_LONG, "messages",
         "maximum context length is 256 tokens", "Please reduce the length of the messages", kind=CONTEXT,
         vllm="This model's maximum context length is ",
         openai=(400, TOO_LONG, "This model's maximum context length is 256 tokens. However, your messages")),
    chat("long output", {"max_tokens": 10**6}, TOO_LONG, "messages", "maximum context length", "you requested",
         kind=CONTEXT, vllm="This model's maximum context length is ",
         openai=(400, TOO_LONG, "Please reduce the length of the messages or completion.")),
    chat("long output, new name", {"max_completion_tokens": 10**6}, TOO_LONG, "messages", "maximum context length",
         kind=CONTEXT, openai=(400, "invalid_value", "max_tokens is too large")),
    Case("long prompt", {"model": MODEL, "prompt": LONG}, 400, TOO_LONG, "prompt",
         ("maximum context length is 256 tokens", "Please reduce the length of the prompt"), CONTEXT, COMPLETIONS,
         vllm="This model's maximum context length is ",
         openai=(400, TOO_LONG, "This model's maximum context length is")),
    Case("long prompt of ids", {"model": MODEL, "prompt": [5] * 300}, 400, TOO_LONG, "prompt",
         ("maximum context length",), CONTEXT, COMPLETIONS, openai=(400, TOO_LONG, "maximum context length")),
    Case("long input of a response", {"model": MODEL, "input": LONG}, 400, TOO_LONG, "input",
         ("maximum context length",), CONTEXT, RESPONSES,
         openai=(400, TOO_LONG, "Your input exceeds the context window of this model.")),
    Case("long text of an embedding", {"model": MODEL, "input": LONG}, 400, TOO_LONG, "input",
         ("maximum context length",), CONTEXT, EMBEDDINGS, vllm="This model's maximum context length is ",
         openai=(400, "invalid_request_error", "This model's maximum context length is")),
    Case("long text of a score", {"model": MODEL, "text_1": "a", "text_2": LONG}, 400, TOO_LONG, "text_2",
         ("maximum context length",), CONTEXT, SCORE, vllm="This model's maximum context length is "),
    Case("long prompt, Anthropic's way", {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user",
         "content": LONG}]}, 400, TOO_LONG, "messages", ("prompt is too long:", "maximum"), CONTEXT, MESSAGES),
    # ---- bodies and fields
    Case("no JSON", b"{", 400, "invalid_json", None, ("not valid JSON",),
         openai=(400, "invalid_request_error", "We could not parse the JSON body of your request.")),
    Case("no messages", {"model": MODEL}, 400, REQUIRED, "messages", ("messages is missing",),
         openai=(400, REQUIRED, "Missing required parameter: 'messages'.")),
    Case("no model", SAY | {"model": 5}, 400, TYPE, "model", ("model must be",),
         openai=(400, TYPE, "Invalid type for 'model'")),
    chat("empty messages", {"messages": []}, INVALID, "messages", "at least one message",
         openai=(400, "empty_array", "Invalid 'messages': empty array.")),
    Case("empty prompt", {"model": MODEL, "prompt": []}, 400, TYPE, "prompt", ("prompt",), path=COMPLETIONS,
         vllm="Either prompt or prompt_embeds must be provided and non-empty."),
    chat("unknown field", {"temprature": 1}, UNKNOWN, "temprature", "did you mean temperature",
         openai=(400, UNKNOWN, "Unknown parameter: 'temprature'.")),
    chat("wrong type", {"temperature": "hot"}, TYPE, "temperature", "temperature must be",
         openai=(400, TYPE, "Invalid type for 'temperature': expected a decimal, but got a string instead.")),
    chat("temperature too low", {"temperature": -1}, INVALID, "temperature", "temperature must be",
         vllm="temperature must be non-negative", openai=(400, "decimal_below_min_value", "Invalid 'temperature'")),
    chat("top_p too high", {"top_p": 2}, INVALID, "top_p", "top_p must be", vllm="top_p must be in (0, 1]",
         openai=(400, "decimal_above_max_value", "Invalid 'top_p'")),
    chat("no choices", {"n": 0}, INVALID, "n", "n must be",
         openai=(400, "integer_below_min_value", "Invalid 'n'")),
    chat("no tokens", {"max_tokens": 0}, INVALID, "max_tokens", "max_tokens must be",
         vllm="max_tokens must be at least 1", openai=(400, "integer_below_min_value", "Invalid 'max_tokens'")),
    chat("min above max", {"min_tokens": 9, "max_tokens": 2}, INVALID, "min_tokens", "min_tokens", "max_tokens",
         vllm="min_tokens must be less than or equal to "),
    chat("a field that is not supported", {"functions": [{"name": "f"}]}, UNSUPPORTED, "functions", "not supported",
         openai=(400, UNSUPPORTED, "Unsupported parameter: 'functions' is not supported with this model.")),
    chat("options of no stream", {"stream_options": {"include_usage": True}}, INVALID, "stream_options", "stream",
         vllm="Stream options can only be defined when `stream=True`.",
         openai=(400, "invalid_request_error", "The 'stream_options' parameter is only allowed when 'stream' is")),
    chat("image", {"messages": [{"role": "user", "content": [IMAGE]}]}, TYPE, "messages[0].content", "image_url",
         "text only", openai=(400, "invalid_request_error", "image_url is only supported by certain models.")),
    chat("role", {"messages": [{"role": "robot", "content": "a"}]}, TYPE, "messages[0].role", "must be",
         openai=(400, INVALID, "Invalid value: 'robot'. Supported values are:")),
    # ---- log-probabilities
    chat("best without logprobs", {"top_logprobs": 2}, INVALID, "top_logprobs", "logprobs=true",
         vllm="when using `top_logprobs`, `logprobs` must be set to true.",
         openai=(400, "invalid_request_error", "The 'top_logprobs' parameter is only allowed when 'logprobs' is")),
    chat("too many logprobs", {"logprobs": True, "top_logprobs": 21}, INVALID, "top_logprobs", "20",
         vllm="which is greater than max allowed: ",
         openai=(400, "integer_above_max_value", "Invalid 'top_logprobs'")),
    chat("named without logprobs", {"logprob_token_ids": [1]}, INVALID, "logprob_token_ids", "logprobs=true",
         vllm="when using `logprob_token_ids`, `logprobs` must be set to true."),
    Case("logprobs of the prompt in a stream", {"model": MODEL, "prompt": "a", "stream": True, "prompt_logprobs": 1},
         400, INVALID, "prompt_logprobs", ("stream",), path=COMPLETIONS,
         vllm="`prompt_logprobs` are not available when `stream=True`."),
    # ---- tools and formats
    chat("choice without tools", {"tool_choice": "required"}, INVALID, "tool_choice", "tools",
         vllm="When using `tool_choice`, `tools` must be set.",
         openai=(400, "invalid_request_error", "'tool_choice' is only allowed when 'tools' are specified.")),
    chat("choice of no tool", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         INVALID, "tool_choice", "x", vllm="The tool specified in `tool_choice` does not match any",
         openai=(400, "invalid_request_error", "Tool choice 'x' not found in 'tools' parameter.")),
    chat("schema missing", {"response_format": {"type": "json_schema"}}, REQUIRED, "response_format.json_schema",
         "json_schema", vllm="'json_schema' field must be provided.",
         openai=(400, REQUIRED, "Missing required parameter: 'response_format.json_schema'.")),
    chat("unknown format", {"response_format": {"type": "yaml"}}, TYPE, "response_format.type", "json_schema",
         openai=(400, INVALID, "Invalid value: 'yaml'. Supported values are: 'json_object', 'json_schema', and")),
    chat("two formats", {"regex": "a", "structured_outputs": {"regex": "a"}}, INVALID, "regex", "one of them",
         vllm="You can only use one kind of constraints for structured "),
    # ---- responses
    Case("unknown response", None, 404, "not_found", "response_id", ("Response with id 'resp_1' not found",), MISSING,
         f"{RESPONSES}/resp_1", vllm="Response with id '{response_id}' not found.", method="GET",
         openai=(404, "invalid_request_error", "Response with id 'resp_1' not found.")),
    Case("cancel of an unknown response", None, 404, "not_found", "response_id", ("not found",), MISSING,
         f"{RESPONSES}/resp_1/cancel", vllm="Response with id '{response_id}' not found.",
         openai=(404, "invalid_request_error", "Response with id 'resp_1' not found.")),
    Case("unknown previous response", {"model": MODEL, "input": "a", "previous_response_id": "resp_1"}, 400,
         "previous_response_not_found", "previous_response_id", ("Previous response with id 'resp_1' not found",),
         GONE, RESPONSES,
         openai=(400, "previous_response_not_found", "Previous response with id 'resp_1' not found.")),
    Case("built-in tool", {"model": MODEL, "input": "a", "tools": [{"type": "web_search"}]}, 400, TYPE,
         "tools[0].type", ("web_search", "function"), path=RESPONSES),
)  # fmt: skip


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    model = replace(served_model(tmp_path_factory.mktemp("model")), tool_parser=HermesParser)
    return app_for(saying(model, "hello"), model, tenancy=Tenancy(FixedKeys.one(KEY)))


async def answered(app, case: Case):
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"} | case.headers
    headers = {name: value for name, value in headers.items() if value}
    sent = (
        {"content": case.body} if isinstance(case.body, bytes) else {} if case.body is None else {"json": case.body}
    )
    async with client_for(app) as client:
        return await client.request(case.method, case.path, headers=headers, **sent)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_an_error_is_what_clients_take_it_for(app, case):
    answer = await answered(app, case)
    error = answer.json()["error"]
    told = answer.status_code, error["code"], error["param"]
    assert told == (case.status, case.code, case.param), answer.text
    for words in case.words:
        assert words.lower() in answer.text.lower()
    assert taken_for(answer.status_code, answer.text) == case.kind
    if case.openai is not None:
        assert answer.status_code == case.openai[0], "clients of OpenAI go by the status"
    if answer.status_code == 400 and case.path != MESSAGES:
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("code", "status", "kind", "type_"),
    [
        ("overloaded", 429, RATE, "rate_limit_error"),
        ("rate_limit_exceeded", 429, RATE, "rate_limit_error"),
        ("no_replica", 503, BUSY, "server_error"),
        ("asleep", 503, BUSY, "server_error"),
        ("shutting_down", 503, BUSY, "server_error"),
        ("deadline_exceeded", 504, TIMEOUT, "server_error"),
        ("internal_error", 500, FAILED, "server_error"),
        ("permission_denied", 403, AUTH, "permission_error"),
    ],
)
def test_errors_of_the_server_are_taken_for_what_they_are(code, status, kind, type_):
    error = ApiError(code, "try again in 3 s")
    assert (error.status, error.type) == (status, type_)
    assert taken_for(error.status, str(error.body())) == kind
    assert error.retryable is (status in (429, 503))


def test_there_are_as_many_cases_as_clients_match_on():
    assert len(CASES) >= 46
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.skipif(not os.environ.get(PEER), reason=f"no vLLM to read: set {PEER} to the folder of its package")
def test_vllms_words_are_those_of_the_vllm_that_is_installed():
    sources = "".join(one.read_text(encoding="utf-8") for one in Path(os.environ[PEER]).rglob("*.py"))
    missing = [case.vllm for case in CASES if case.vllm and case.vllm not in sources]
    assert not missing
