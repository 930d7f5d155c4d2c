"""The table of fields in docs/api.md, made from the request models and the list of refusals.

python -m cluster.http.conformance > docs/api.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import json

from cluster.http.batch_fields import (
    BatchFields,
    BatchListFields,
    FileFields,
    FileListFields,
)
from cluster.http.tokens import REFUSED_TOKENIZE
from cluster.openai.embedding_fields import REFUSED_EMBEDDING, EmbeddingFields
from cluster.openai.field_types import Fields
from cluster.openai.refusals import REFUSED_CHAT, REFUSED_COMPLETION, Refusal
from cluster.openai.responses.fields import REFUSED_RESPONSE, ResponseRequest
from cluster.openai.schema import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields

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
_HEAD = """\
# The HTTP API

Made by `python -m cluster.http.conformance > docs/api.md`; a test keeps it up to date. The same, for machines, is
at `/openapi.json`.

- Every field is honoured, or the request is refused with 400, and `error.param` names the field. A field that is null
  counts as not sent, inside others, too. *Only* lists the values with which a refused field is let through, since
  they ask for nothing.
- A hint, which could not change the answer, is taken where nothing here has a use for it, and the answer's header
  `x-squadron-ignored` names it (in a batch, the log). *Hint* lists values of refused fields that are. Others are what
  the chat template does not read of `reasoning_effort`, `chat_template_kwargs`, `name` and `reasoning_content` (or
  `reasoning`) of messages; `cache_control` of their parts; `index` of calls; what clients' libraries add to answers
  that they send back (`parsed`, `annotations` and their like); empty strings in `stop`; `continuous_usage_stats`
  without `include_usage`; of responses `reasoning.summary`, `text.verbosity`, and all of `include` but
  log-probabilities. With `--strict-fields` they are refused.
- What is said needs a chat template that reads it: `tools`, `tool_calls`, the role `tool`.
- In chats, control tokens (`<|im_end|>`, `<tool_call>`) are the template's alone: in the text of users and tools they
  are plain text. A developer's text may hold those that are not special tokens, a prompt of completions all.
- Streams are OpenAI's: first a delta with the role, one terminal chunk per choice, with `include_usage` a chunk with
  empty `choices`, then `[DONE]`. An error in mid-stream is a data event with the error object, and no `[DONE]`.
- Errors are `{"error": {message, type, param, code, retryable, request_id}}`. `x-request-id` is on every answer: what
  the client sent, or else the id that the body tells. `Retry-After` is on 429 and 503. Logs name a request by its id
  (`id` of an answer, `request_id` of an error) and the client's own `x-request-id`.
- `x-request-timeout-seconds` on a POST is the time that its answer may take; then it ends in `deadline_exceeded`
  (504, or an error in mid-stream).
- `x-session-id`, 1 to 256 printable ASCII characters without spaces, names the conversation that a request is of, for
  `--routing-policy session` ([cluster.md](cluster.md#routing)).
- Pages of other sites may use a server with keys: a preflight (CORS) is answered, and answers can be read. One
  without keys refuses them (403 `forbidden_origin`) and names that are not its own in `Host` (403 `forbidden_host`),
  and wants a `Content-Type` with every body ([tenants.md](tenants.md#without-keys)).
- `finish_reason` is `stop`, `length` or `tool_calls`.
- `/v1/files` and `/v1/batches` need `--batch-dir` ([batch.md](batch.md#on-a-server)); without fields are
  `GET` and `DELETE /v1/files/ID`, `GET /v1/files/ID/content`, `GET /v1/batches/ID`, `POST /v1/batches/ID/cancel`.
"""


_KINDS = {str: "any text", int: "any number", float: "any number", dict: "any object"}  # of hints


@dataclass(frozen=True, slots=True)
class Table:
    """One route's fields. openai: names of OpenAI's own, () = the route is none of OpenAI's."""

    title: str
    schema: type[Fields]
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    openai: frozenset[str] = frozenset()


TABLES: Sequence[Table] = (
    Table("POST /v1/chat/completions", ChatFields, REFUSED_CHAT, OPENAI_CHAT),
    Table("POST /v1/completions", CompletionFields, REFUSED_COMPLETION, OPENAI_COMPLETION),
    Table("POST /v1/responses", ResponseRequest, REFUSED_RESPONSE, OPENAI_RESPONSE),
    Table("POST /v1/embeddings", EmbeddingFields, REFUSED_EMBEDDING, OPENAI_EMBEDDING),
    Table("POST /v1/files", FileFields, openai=OPENAI_FILE),
    Table("GET /v1/files", FileListFields, openai=OPENAI_FILE_LIST),
    Table("POST /v1/batches", BatchFields, openai=OPENAI_BATCH),
    Table("GET /v1/batches", BatchListFields, openai=OPENAI_BATCH_LIST),
    Table("POST /tokenize", TokenizeFields, REFUSED_TOKENIZE),
    Table("POST /detokenize", DetokenizeFields),
)


def document(tables: Sequence[Table] = TABLES) -> str:
    """Return the text of docs/api.md."""
    return _HEAD + "".join([_section(table) for table in tables])


def _section(table: Table) -> str:
    names = sorted({*_honoured(table), *table.refused})
    ours = [name for name in names if name not in table.openai]
    theirs = [name for name in names if name in table.openai]
    parts = [("", ours)] if not theirs else [("OpenAI's fields", theirs), ("Beyond OpenAI", ours)]
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


if __name__ == "__main__":
    sys.stdout.write(document())
