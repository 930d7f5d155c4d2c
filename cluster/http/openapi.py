"""The API document at `/openapi.json`, made from the request models and the routes below.

FastAPI would make it only of handlers that it calls itself; these are plain ASGI, which costs nothing for each token.
Source: OpenAPI Specification 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, get_args

from pydantic.json_schema import models_json_schema

from cluster.anthropic.message_fields import CountTokensFields, MessagesRequest
from cluster.batch.server.objects import Status
from cluster.http.batch_routes import BatchFields, BatchListFields, FileFields, FileListFields
from cluster.http.drain_route import DrainFields
from cluster.http.sleep_routes import AsleepQuery, SleepQuery, WakeQuery
from cluster.openai.embeddings import EmbeddingFields
from cluster.openai.fields import Fields
from cluster.openai.request_fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from cluster.openai.response_fields import ItemsQuery, ResponseQuery, ResponseRequest
from cluster.openai.scoring import RerankFields, ScoreFields

_REFS = "#/components/schemas/{model}"
_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_NO_WORD = re.compile(r"\W+")
RAW: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Operation:
    """One route.

    request: the model of its body, None = it has none. answer: JSON schema of the 200 answer, RAW = any bytes. open:
    no key is needed. not_yet: its 503 has the body of its 200. verb: in lower case; "" = post with a body, else get.
    query: the model of its query. form: the body is multipart/form-data.
    """

    path: str
    summary: str
    answer: dict[str, Any]
    request: type[Fields] | None = None
    streams: bool = False
    open: bool = False
    not_yet: bool = False
    verb: str = ""
    query: type[Fields] | None = None
    form: bool = False

    @property
    def method(self) -> str:
        """In lower case."""
        return self.verb or ("get" if self.request is None else "post")

    @property
    def name(self) -> str:
        """That no other operation has."""
        return f"{self.method}_{_NO_WORD.sub('_', self.path).strip('_')}"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_USAGE = _object(prompt_tokens=_INTEGER, completion_tokens=_INTEGER, total_tokens=_INTEGER)
_CARD = _object(id=_STRING, object={"const": "model"}, created=_INTEGER, owned_by=_STRING, max_model_len=_INTEGER)
_VECTOR = {"anyOf": [_list({"type": "number"}), {"type": "string", "contentEncoding": "base64"}]}
_REASON = {"enum": ["stop", "length", "tool_calls"]}
_ERROR = _object(
    error=_object(
        message=_STRING,
        type=_STRING,
        param={"type": ["string", "null"]},
        code=_STRING,
        retryable={"type": "boolean"},
        request_id={"type": ["string", "null"]},
    )
)


def _answer(name: str, choice: dict[str, Any]) -> dict[str, Any]:
    head = {"id": _STRING, "object": {"const": name}, "created": _INTEGER, "model": _STRING}
    return _object(**head, choices=_list(choice), usage=_USAGE)


_FILE = _object(
    id=_STRING,
    object={"const": "file"},
    bytes=_INTEGER,
    created_at=_INTEGER,
    filename=_STRING,
    purpose={"enum": ["batch", "batch_output"]},
    status=_STRING,
)
_BATCH = _object(
    id=_STRING,
    object={"const": "batch"},
    endpoint=_STRING,
    input_file_id=_STRING,
    completion_window=_STRING,
    status={"enum": [*get_args(Status)]},
    created_at=_INTEGER,
    expires_at=_INTEGER,
    request_counts=_object(total=_INTEGER, completed=_INTEGER, failed=_INTEGER),
)


def _page(items: dict[str, Any]) -> dict[str, Any]:
    ends = {"type": ["string", "null"]}
    return _object(
        object={"const": "list"}, data=_list(items), first_id=ends, last_id=ends, has_more={"type": "boolean"}
    )


_RESPONSE_USAGE = _object(input_tokens=_INTEGER, output_tokens=_INTEGER, total_tokens=_INTEGER)
_KEPT = _object(
    id=_STRING,
    object={"const": "response"},
    created_at=_INTEGER,
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    model=_STRING,
    output=_list({"type": "object"}),
    usage={"anyOf": [_RESPONSE_USAGE, {"type": "null"}]},
)
STORAGE_OPERATIONS: Sequence[Operation] = (
    Operation("/v1/files", "Upload the input of batches.", _FILE, FileFields, form=True),
    Operation("/v1/files", "List files.", _page(_FILE), query=FileListFields),
    Operation("/v1/files/{id}", "Describe a file.", _FILE),
    Operation(
        "/v1/files/{id}",
        "Delete a file.",
        _object(id=_STRING, object={"const": "file"}, deleted={"const": True}),
        verb="delete",
    ),
    Operation("/v1/files/{id}/content", "Fetch a file.", RAW),
    Operation("/v1/batches", "Have the requests of a file answered within a day.", _BATCH, BatchFields),
    Operation("/v1/batches", "List batches.", _page(_BATCH), query=BatchListFields),
    Operation("/v1/batches/{id}", "Tell how far a batch is.", _BATCH),
    Operation("/v1/batches/{id}/cancel", "Have a batch ended.", _BATCH, verb="post"),
)
SERVED: Sequence[Operation] = (
    Operation(
        "/v1/chat/completions",
        "Answer a conversation.",
        _answer("chat.completion", _object(index=_INTEGER, message={"type": "object"}, finish_reason=_REASON)),
        ChatFields,
        streams=True,
    ),
    Operation(
        "/v1/completions",
        "Go on with a text.",
        _answer("text_completion", _object(index=_INTEGER, text=_STRING, finish_reason=_REASON)),
        CompletionFields,
        streams=True,
    ),
    Operation(
        "/v1/responses",
        "Answer a conversation; keep the answer where store or background asks for it.",
        _object(
            id=_STRING,
            object={"const": "response"},
            created_at=_INTEGER,
            status={"enum": ["queued", "in_progress", "completed", "incomplete"]},
            model=_STRING,
            output=_list({"type": "object"}),
            usage={"anyOf": [_RESPONSE_USAGE, {"type": "null"}]},
        ),
        ResponseRequest,
        streams=True,
    ),
    Operation(
        "/v1/chat/completions/{completion_id}",
        "End a chat completion that an Idempotency-Key keeps, and forget it.",
        _object(object={"const": "chat.completion.deleted"}, id=_STRING, deleted={"const": True}),
        verb="delete",
    ),
    Operation(
        "/v1/responses/{response_id}", "Fetch a response that is kept.", _KEPT, query=ResponseQuery, streams=True
    ),
    Operation(
        "/v1/responses/{response_id}/input_items",
        "List what a response that is kept was made from.",
        _page({"type": "object"}),
        query=ItemsQuery,
    ),
    Operation("/v1/responses/{response_id}/cancel", "End a response that runs.", _KEPT, verb="post"),
    Operation(
        "/v1/responses/{response_id}",
        "Delete a response.",
        _object(id=_STRING, object={"const": "response"}, deleted={"const": True}),
        verb="delete",
    ),
    Operation(
        "/v1/messages",
        "Answer a conversation, in Anthropic's form.",
        _object(
            id=_STRING,
            type={"const": "message"},
            role={"const": "assistant"},
            model=_STRING,
            content=_list({"type": "object"}),
            stop_reason={
                "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
            },
            stop_sequence={"type": ["string", "null"]},
            usage=_object(input_tokens=_INTEGER, output_tokens=_INTEGER),
        ),
        MessagesRequest,
        streams=True,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation, in Anthropic's form.",
        _object(input_tokens=_INTEGER),
        CountTokensFields,
    ),
    Operation(
        "/v1/embeddings",
        "Turn texts into vectors of length 1.",
        _object(
            object={"const": "list"},
            data=_list(_object(object={"const": "embedding"}, index=_INTEGER, embedding=_VECTOR)),
            model=_STRING,
            usage=_object(prompt_tokens=_INTEGER, total_tokens=_INTEGER),
        ),
        EmbeddingFields,
    ),
    Operation(
        "/v1/score",
        "Tell how alike texts are: the cosine of their embeddings.",
        _object(
            id=_STRING,
            object={"const": "list"},
            created=_INTEGER,
            model=_STRING,
            data=_list(_object(index=_INTEGER, object={"const": "score"}, score={"type": "number"})),
            usage=_object(prompt_tokens=_INTEGER, total_tokens=_INTEGER),
        ),
        ScoreFields,
    ),
    Operation(
        "/v1/rerank",
        "Sort documents by how alike they are to a query, by the cosine of embeddings.",
        _object(
            id=_STRING,
            model=_STRING,
            results=_list(_object(index=_INTEGER, relevance_score={"type": "number"})),
            usage=_object(prompt_tokens=_INTEGER, total_tokens=_INTEGER),
        ),
        RerankFields,
    ),
    Operation(
        "/tokenize",
        "Turn a text or a conversation into tokens.",
        _object(count=_INTEGER, max_model_len=_INTEGER, tokens=_list(_INTEGER)),
        TokenizeFields,
    ),
    Operation("/detokenize", "Turn tokens into text.", _object(prompt=_STRING), DetokenizeFields),
    *STORAGE_OPERATIONS,
    Operation("/v1/models", "List the models.", _object(object={"const": "list"}, data=_list(_CARD))),
    Operation(
        "/tokenizer_info",
        "Describe the tokenizer, for clients that tokenize by themselves.",
        _object(tokenizer_class=_STRING, vocab_size=_INTEGER, model_max_length=_INTEGER),
    ),
    Operation("/load", "Tell how many requests run or wait in this router.", _object(server_load=_INTEGER)),
    Operation("/ping", "Tell whether requests can be served.", _object(status=_STRING), open=True, not_yet=True),
    Operation("/version", "Tell the version.", _object(version=_STRING)),
    Operation("/health", "Tell that the process lives.", _object(status=_STRING), open=True),
    Operation("/ready", "Tell whether requests can be served.", _object(ready={"type": "boolean"}), not_yet=True),
)
_SLEEPERS = {"type": "object"}  # by model: level, parts that sleep, what was released, level of each replica
# What a server over Ray has beside.
OPERATIONS: Sequence[Operation] = (
    *SERVED,
    Operation(
        "/drain",
        "Announce that a node ends, with an operator's key.",
        _object(nodes=_list(_STRING), deadline={"type": "number"}),
        DrainFields,
    ),
    Operation(
        "/sleep",
        "Have replicas give memory back, with an operator's key: --enable-sleep-mode.",
        _object(status=_STRING, level=_INTEGER, models=_SLEEPERS),
        query=SleepQuery,
        verb="post",
    ),
    Operation(
        "/wake_up",
        "Have replicas take their memory again, with an operator's key.",
        _object(status=_STRING, models=_SLEEPERS),
        query=WakeQuery,
        verb="post",
    ),
    Operation(
        "/is_sleeping",
        "Tell whether models sleep.",
        _object(is_sleeping={"type": "boolean"}, models=_SLEEPERS),
        query=AsleepQuery,
    ),
)


# Either is enough.
_KEY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer"},
    "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def openapi(
    operations: Sequence[Operation] = OPERATIONS, keyed: bool = True, root_path: str | None = None
) -> dict[str, Any]:
    """Return the OpenAPI document of the given routes.

    keyed: whether the server has keys, and asks for one. root_path: below which clients find the routes.
    """
    requests = [one.request for one in operations if one.request is not None]
    _, schemas = models_json_schema([(one, "validation") for one in requests], ref_template=_REFS)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Squadron",
            "version": version("squadron"),
            "description": "OpenAI's and Anthropic's APIs, with the extensions of vLLM's server. Unknown fields, and "
            "fields that are not supported, are refused with 400 and their name.",
        },
        **({} if root_path is None else {"servers": [{"url": root_path}]}),
        "paths": _paths(operations, keyed),
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            **({"securitySchemes": _KEY_SCHEMES} if keyed else {}),
        },
        **({"security": [{name: []} for name in _KEY_SCHEMES]} if keyed else {}),
    }


def _paths(operations: Sequence[Operation], keyed: bool) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method] = _operation(one, keyed)
    return paths


def _parameters(one: Operation) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", one.path)
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _STRING} for name in names
    ]
    fields = {} if one.query is None else one.query.model_json_schema()["properties"]
    return found + [{"name": name, "in": "query", "schema": _given(schema)} for name, schema in fields.items()]


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a query parameter that is there: it cannot be null."""
    kept = {name: value for name, value in schema.items() if name not in ("anyOf", "default", "title")}
    either = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    return kept | (either[0] if either else {})


def _operation(one: Operation, keyed: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": one.answer}}
    if one.answer is RAW:
        content = {"application/octet-stream": {}}
    if one.streams:
        content["text/event-stream"] = {"schema": {"type": ["string", "object"]}}
    error = {"application/json": {"schema": {"$ref": _REFS.format(model="Error")}}}
    told: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {
                "description": "The request cannot be served as it is; `param` names the field.",
                "content": error,
            },
            "5XX": {"description": "The server failed, or has no replica; `retryable` tells.", "content": error},
        },
    }
    if one.request is not None:
        kind = "multipart/form-data" if one.form else "application/json"
        body = {kind: {"schema": {"$ref": _REFS.format(model=one.request.__name__)}}}
        told["requestBody"] = {"required": True, "content": body}
    if parameters := _parameters(one):
        told["parameters"] = parameters
    if one.not_yet:
        told["responses"]["503"] = {"description": "Not yet, or not any more.", "content": content}
    if one.open and keyed:
        told["security"] = []
    return told
