"""docs/reference/api.md: the fields of each route, from the request models and the list of refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import json

from cluster.anthropic.message_fields import (
    REFUSED_COUNT,
    REFUSED_MESSAGES,
    CountTokensFields,
    MessagesRequest,
)
from cluster.http.batch_routes import (
    BatchFields,
    BatchListFields,
    FileFields,
    FileListFields,
)
from cluster.http.drain_route import DrainFields
from cluster.http.endpoints import REFUSED_TOKENIZE
from cluster.http.sleep_routes import AsleepQuery, SleepQuery, WakeQuery
from cluster.openai.embeddings import REFUSED_EMBEDDING, EmbeddingFields
from cluster.openai.fields import Fields
from cluster.openai.refusals import REFUSED_CHAT, REFUSED_COMPLETION, Refusal
from cluster.openai.request_fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from cluster.openai.response_fields import (
    REFUSED_ITEMS_QUERY,
    REFUSED_QUERY,
    REFUSED_RESPONSE,
    ItemsQuery,
    ResponseQuery,
    ResponseRequest,
)
from cluster.openai.scoring import REFUSED_RERANK, REFUSED_SCORE, RerankFields, ScoreFields

_SHARED = {
    "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "model", "n", "presence_penalty", "seed",
    "stop", "stream", "stream_options", "temperature", "top_p", "user",
}  # fmt: skip
_CHAT = {
    "audio", "function_call", "functions", "max_completion_tokens", "messages", "metadata", "modalities",
    "moderation", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning_effort", "response_format", "safety_identifier", "service_tier",
    "store", "tool_choice", "tools", "top_logprobs", "verbosity", "web_search_options",
}  # fmt: skip
# The fields of OpenAI's own request objects, as of version 3.52 of its Python client.
OPENAI_COMPLETION = frozenset(_SHARED | {"prompt", "best_of", "echo", "suffix"})
OPENAI_CHAT = frozenset(_SHARED | _CHAT)
OPENAI_EMBEDDING = frozenset({"dimensions", "encoding_format", "input", "model", "user"})
OPENAI_FILE = frozenset({"expires_after", "file", "purpose"})
OPENAI_FILE_LIST = frozenset({"after", "limit", "order", "purpose"})
OPENAI_BATCH = frozenset({"completion_window", "endpoint", "input_file_id", "metadata", "output_expires_after"})
OPENAI_BATCH_LIST = frozenset({"after", "limit"})
OPENAI_RESPONSE_QUERY = frozenset({"include", "include_obfuscation", "starting_after", "stream"})
OPENAI_ITEMS_QUERY = frozenset({"after", "include", "limit", "order"})
OPENAI_RESPONSE = frozenset(
    {
        "access_programs", "background", "context_management", "conversation", "image", "include", "input",
        "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "moderation",
        "parallel_tool_calls", "previous_response_id", "prompt", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store", "stream",
        "stream_options", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation",
        "user",
    }
)  # fmt: skip
# The fields of Anthropic's own request objects, as of version 2.14 of its Python client, and of its beta.
ANTHROPIC_COUNT = frozenset(
    {
        "cache_control", "context_management", "mcp_servers", "messages", "model", "output_config", "output_format",
        "speed", "system", "thinking", "tool_choice", "tools",
    }
)  # fmt: skip
ANTHROPIC_MESSAGES = frozenset(
    ANTHROPIC_COUNT
    | {
        "container", "diagnostics", "inference_geo", "max_tokens", "metadata", "service_tier", "stop_sequences",
        "stream", "temperature", "top_k", "top_p",
    }
)  # fmt: skip
_HEAD = """\
# The HTTP API

`make docs` writes this page; a test checks that it is up to date. `/openapi.json` has the same for machines.

- Every field is honoured, or the request is refused with 400 and `error.param` names the field. A field that is null
  counts as not sent, also inside others. *Only* lists values with which a refused field is accepted, because they
  ask for nothing.
- A hint cannot change the answer. It is accepted without effect, and the answer's header `x-squadron-ignored` names
  it (in a batch, the log). *Hint* lists values of refused fields that count as hints. Other hints: what the chat
  template does not read of `reasoning_effort`, `chat_template_kwargs`, and of a message's `name` and
  `reasoning_content` (or `reasoning`); `cache_control` of a message's parts; `index` of calls; what client libraries
  add to answers that they send back (`parsed`, `annotations` and others); empty strings in `stop`;
  `continuous_usage_stats` without `include_usage`; in responses `reasoning.summary`, `text.verbosity`, and all of
  `include` but log-probabilities. `--strict-fields` refuses hints.
- `tools`, `tool_calls` and the role `tool` need a chat template that reads them.
- In chats, only the template writes control tokens (`<|im_end|>`, `<tool_call>`). In the text of users and tools they
  are plain text. A developer's text may hold those that are not special tokens, a completion's prompt all of them.
- Streams are OpenAI's: a delta with the role, one terminal chunk per choice, with `include_usage` a chunk with empty
  `choices`, then `[DONE]`. An error in a stream is a data event with the error object, without `[DONE]`.
- Errors are `{"error": {message, type, param, code, retryable, request_id}}`. Every answer has `x-request-id`: what
  the client sent, or else the id in the body. 429 and 503 have `Retry-After`. Logs name a request by its id
  (`id` of an answer, `request_id` of an error) and the client's own `x-request-id`.
- On `/v1/messages` errors are in Anthropic's form, `{"type": "error", "error": {type, message, code, param, ...},
  "request_id"}`, and `request-id` has the id, too; a stream ends with an event `error`. A prompt beyond
  the context is `prompt is too long: N tokens > M maximum`. Thoughts are blocks of type `thinking` where the server
  has a `--reasoning-parser`. `max_tokens` may be more than the context holds: the message then ends with
  `model_context_window_exceeded`. Hints there are `cache_control`, `is_error`, `thinking.budget_tokens` without
  `--reasoning-parser` and beside a format or a forced call, what Anthropic adds to tools and blocks, and
  `redacted_thinking`; a template that takes no system messages behind others gets them at the beginning.
  `anthropic-version` is any date since 2023-06-01; who sends it gets `/v1/models` in that form. Anthropic's own tools
  (`web_search` and others), images and documents are refused.
- `/v1/score` and `/v1/rerank` compare embeddings by their cosine, with any model. A reranker that was trained to read
  query and document together needs its own prompt: ask it by a completion.
- `POST /invocations` is SageMaker's: a body with `messages` is a chat, with `prompt` a completion, with `input` an
  embedding, with `documents` a rerank, with `text_1` a score; `GET /ping` needs no key. `GET /tokenizer_info` is what
  lm-eval's remote tokenizer asks for (`?model=` where there are several), `GET /load` the requests that run or wait
  in this router. `/docs` shows `/openapi.json`.
- With `--enable-sleep-mode`, `POST /sleep` has the replicas of a model give their memory back, and `POST /wake_up`
  take it again: [operations.md](../guides/operations.md#sleep). Fields are parameters of the URL, as in
  `/sleep?level=2&mode=wait`.
- A key is sent as `Authorization: Bearer KEY`, or as `x-api-key: KEY`.
- `x-request-timeout-seconds` on a POST limits the time of its answer, which then ends with `deadline_exceeded`
  (504, or an error in the stream).
- `x-session-id`, 1 to 256 printable ASCII characters without spaces, names the conversation of a request, for
  `--routing-policy session` ([routing.md](../guides/routing.md)).
- Pages of other sites may use a server with keys: it answers preflights (CORS). A server without keys refuses them
  (403 `forbidden_origin`), refuses foreign names in `Host` (403 `forbidden_host`), and requires a `Content-Type`
  with every body ([tenants.md](../guides/tenants.md#without-keys)).
- `finish_reason` is `stop`, `length` or `tool_calls`.
- `Idempotency-Key` and `Last-Event-ID` on chat completions, completions and responses, `DELETE /v1/responses/ID`,
  `DELETE /v1/chat/completions/ID` and `POST /v1/responses/ID/cancel`: [reconnecting.md](../guides/reconnecting.md).
- `/v1/files` and `/v1/batches` need `--batch-dir` ([batch.md](../guides/batch.md#on-a-server)). Without fields are
  `GET` and `DELETE /v1/files/ID`, `GET /v1/files/ID/content`, `GET /v1/batches/ID`, `POST /v1/batches/ID/cancel`.
"""


_KINDS = {str: "any text", int: "any number", float: "any number", dict: "any object"}  # of hints


@dataclass(frozen=True, slots=True)
class Table:
    """One route's fields. openai: names of the API's own, () = the route is none of its; whose: that API is."""

    title: str
    schema: type[Fields]
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    openai: frozenset[str] = frozenset()
    whose: str = "OpenAI"


TABLES: Sequence[Table] = (
    Table("POST /v1/chat/completions", ChatFields, REFUSED_CHAT, OPENAI_CHAT),
    Table("POST /v1/completions", CompletionFields, REFUSED_COMPLETION, OPENAI_COMPLETION),
    Table("POST /v1/responses", ResponseRequest, REFUSED_RESPONSE, OPENAI_RESPONSE),
    Table("GET /v1/responses/ID", ResponseQuery, REFUSED_QUERY, OPENAI_RESPONSE_QUERY),
    Table("GET /v1/responses/ID/input_items", ItemsQuery, REFUSED_ITEMS_QUERY, OPENAI_ITEMS_QUERY),
    Table("POST /v1/messages", MessagesRequest, REFUSED_MESSAGES, ANTHROPIC_MESSAGES, "Anthropic"),
    Table("POST /v1/messages/count_tokens", CountTokensFields, REFUSED_COUNT, ANTHROPIC_COUNT, "Anthropic"),
    Table("POST /v1/embeddings", EmbeddingFields, REFUSED_EMBEDDING, OPENAI_EMBEDDING),
    Table("POST /v1/score", ScoreFields, REFUSED_SCORE),
    Table("POST /v1/rerank", RerankFields, REFUSED_RERANK),
    Table("POST /v1/files", FileFields, openai=OPENAI_FILE),
    Table("GET /v1/files", FileListFields, openai=OPENAI_FILE_LIST),
    Table("POST /v1/batches", BatchFields, openai=OPENAI_BATCH),
    Table("GET /v1/batches", BatchListFields, openai=OPENAI_BATCH_LIST),
    Table("POST /tokenize", TokenizeFields, REFUSED_TOKENIZE),
    Table("POST /detokenize", DetokenizeFields),
    Table("POST /drain", DrainFields),
    Table("POST /sleep", SleepQuery),
    Table("POST /wake_up", WakeQuery),
    Table("GET /is_sleeping", AsleepQuery),
)


def document(tables: Sequence[Table] = TABLES) -> str:
    """Return the text of the page."""
    return _HEAD + "".join([_section(table) for table in tables])


def _section(table: Table) -> str:
    names = sorted({*_honoured(table), *table.refused})
    ours = [name for name in names if name not in table.openai]
    theirs = [name for name in names if name in table.openai]
    parts = [("", ours)] if not theirs else [(f"{table.whose}'s fields", theirs), (f"Beyond {table.whose}", ours)]
    text = f"\n## {table.title}\n"
    for title, group in parts:
        if not group:
            continue
        text += f"\n| {title or 'Field'} | | Note |\n|---|---|---|\n"
        text += "".join([_row(name, table) for name in group])
    return text


def _row(name: str, table: Table) -> str:
    honoured = _honoured(table)
    if name in honoured:
        return f"| `{name}` | honoured | {honoured[name]} |\n"
    refusal = table.refused[name]
    values = ", ".join([f"`{json.encode(value).decode()}`" for value in refusal.neutral])
    only = f" Only {values}." if values else ""
    hints = ", ".join(dict.fromkeys([_KINDS.get(one) or f"`{json.encode(one).decode()}`" for one in refusal.hints]))
    hint = f" Hint: {hints}." if hints else ""
    return f"| `{name}` | refused | {refusal.instead[0].upper()}{refusal.instead[1:]}.{only}{hint} |\n"


def _honoured(table: Table) -> dict[str, str]:
    """Names and notes; a field that can only be null is none."""
    fields = table.schema.model_fields.items()
    return {one.alias or name: one.description or "" for name, one in fields if one.annotation is not type(None)}
