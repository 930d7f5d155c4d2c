"""`/v1/score` and `/v1/rerank`: how alike texts are, as the cosine of their embeddings.

Source: vLLM's server, which scores so with models that embed; Jina's rerank API for the shape of the latter.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import json
from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.openai.body import checked_fields
from cluster.openai.embeddings import SIDE, TRUNCATION, EmbeddingCall, TruncationSide, Vector, embedding_call
from cluster.openai.fields import Fields, Hints, Label, note
from cluster.openai.refusals import Refusal
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError
from engine.request import Pooling

_MAX = 2**31 - 1
MAX_TEXTS = 2047  # beside a query; source: what embeddings take at once
_INPUT = re.compile(r"input(?:\[(\d+)\])?")
_EMBEDDED = ("model", "pooling", "priority", "cache_salt", "truncate_prompt_tokens", "truncation_side")


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise PydanticCustomError("texts", "must be a string or a list of at least one string")
    if len(texts) > MAX_TEXTS:
        raise PydanticCustomError("text_count", f"must hold at most {MAX_TEXTS} texts, not {len(texts)}")
    return texts


_LIST = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_TEXTS}
Texts = Annotated[
    list[str], BeforeValidator(_texts), WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _LIST]})
]


class PairFields(Fields):
    """What scores and ranks share."""

    model: str = Field(description="a name of a served model; GET /v1/models lists them")
    pooling: Pooling | None = note(
        "last: the state of the last token; mean: of all; default: the server's --embedding-pooling"
    )
    user: Label | None = note("a label: changes nothing, is not stored")
    priority: int = note(
        "smaller runs earlier; where the server does not schedule by priority, only 0", -_MAX, _MAX, default=0
    )
    cache_salt: str | None = note("only requests with the same salt share cached prefixes; at most 256 bytes")
    truncate_prompt_tokens: int | None = note(TRUNCATION, -1, _MAX)
    truncation_side: TruncationSide | None = note(SIDE)


class ScoreFields(PairFields):
    """`POST /v1/score`."""

    text_1: Texts = Field(description="one text, or as many as text_2")
    text_2: Texts = Field(description=f"a text, or up to {MAX_TEXTS}; with text_1 {MAX_TEXTS + 1} at most")


class RerankFields(PairFields):
    """`POST /v1/rerank`."""

    query: str = Field(description="what the documents are compared with")
    documents: Texts = Field(description=f"a text, or up to {MAX_TEXTS}")
    top_n: int | None = note("so many of the best; default and 0: all", 0, _MAX)
    return_documents: bool = note("whether results hold the texts", default=True)


REFUSED_PAIR: Mapping[str, Refusal] = {
    "activation": Refusal((), "scores are cosines, from -1 to 1"),
    "use_activation": Refusal((), "scores are cosines, from -1 to 1"),
}
# vLLM's other names for the two.
REFUSED_SCORE: Mapping[str, Refusal] = {
    **REFUSED_PAIR,
    **dict.fromkeys(("queries", "data_1"), Refusal((), "send it as text_1")),
    **dict.fromkeys(("documents", "items", "data_2"), Refusal((), "send it as text_2")),
}
REFUSED_RERANK: Mapping[str, Refusal] = {
    **REFUSED_PAIR,
    "max_chunks_per_doc": Refusal((), "send documents that fit the model's context"),
    "max_tokens_per_doc": Refusal((), "send documents that fit the model's context"),
}
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScoringCall:
    """An accepted call: the texts that are embedded, and what becomes of their vectors. name_of: of each text."""

    embedding: EmbeddingCall
    body: Callable[[Sequence[Vector], str], Body]
    name_of: Callable[[int], str]

    def clients_error(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error that names the client's field."""
        return _renamed(error, self.name_of)


ParseScoring = Callable[[Mapping[str, Any], ServedModel], ScoringCall]


def score_call(fields: Mapping[str, Any], model: ServedModel) -> ScoringCall:
    """Check a call of `/v1/score`; raises `ApiError` or `InvalidRequestError` that names the first wrong field."""
    hints = Hints(model.strict_fields)
    checked = checked_fields(ScoreFields, fields, REFUSED_SCORE, hints)
    firsts, seconds = checked.text_1, checked.text_2
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequestError(
            f"text_1 must hold one text, or as many as text_2, which holds {len(seconds)}, not {len(firsts)}",
            "text_1",
        )
    most = MAX_TEXTS + 1
    if len(firsts) + len(seconds) > most:
        raise InvalidRequestError(f"text_2 must hold at most {most - len(firsts)} texts beside text_1", "text_2")

    def name_of(number: int) -> str:
        return (
            _place("text_1", number, firsts)
            if number < len(firsts)
            else _place("text_2", number - len(firsts), seconds)
        )

    def body(vectors: Sequence[Vector], model_id: str) -> Body:
        left = [*vectors[: len(firsts)]] * (len(seconds) if len(firsts) == 1 else 1)
        scores = [float(np.dot(a, b)) for a, b in zip(left, vectors[len(firsts) :], strict=True)]
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {"object": "list", "created": int(time.time()), "model": model_id, "data": data}

    return _call(checked, [*firsts, *seconds], model, hints, "score", body, name_of)


def rerank_call(fields: Mapping[str, Any], model: ServedModel) -> ScoringCall:
    """Check a call of `/v1/rerank`; raises `ApiError` or `InvalidRequestError` that names the first wrong field."""
    hints = Hints(model.strict_fields)
    checked = checked_fields(RerankFields, fields, REFUSED_RERANK, hints)
    documents = checked.documents
    if checked.top_n is not None and checked.top_n < 0:
        raise InvalidRequestError(f"top_n must be at least 0, not {checked.top_n}", "top_n")

    def name_of(number: int) -> str:
        return "query" if number == 0 else _place("documents", number - 1, documents)

    def body(vectors: Sequence[Vector], model_id: str) -> Body:
        query, *others = vectors
        scores = [float(np.dot(query, one)) for one in others]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: checked.top_n or None]
        results = [
            {
                "index": i,
                **({"document": {"text": documents[i]}} if checked.return_documents else {}),
                "relevance_score": scores[i],
            }
            for i in best
        ]
        return {"model": model_id, "results": results}

    return _call(checked, [checked.query, *documents], model, hints, "rerank", body, name_of)


def _call(
    checked: PairFields,
    texts: Sequence[str],
    model: ServedModel,
    hints: Hints,
    prefix: str,
    body: Callable[[Sequence[Vector], str], Body],
    name_of: Callable[[int], str],
) -> ScoringCall:
    asked = {name: value for name in _EMBEDDED if (value := getattr(checked, name)) is not None}
    try:
        embedding = embedding_call({**asked, "input": list(texts)}, model)
    except InvalidRequestError as error:
        raise _renamed(error, name_of) from error
    request_id = f"{prefix}-{embedding.request_id.removeprefix('embd-')}"
    requests = [replace(one, request_id=f"{request_id}-{i}") for i, one in enumerate(embedding.requests)]
    named = replace(embedding, request_id=request_id, requests=tuple(requests), ignored=hints.names)
    return ScoringCall(named, body, name_of)


def answer_body(call: ScoringCall, vectors: Sequence[Vector], model_id: str) -> bytes:
    """Return the body of the answer, as JSON."""
    tokens = call.embedding.num_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json.encode({"id": call.embedding.request_id, **call.body(vectors, model_id), "usage": usage})


def _place(name: str, number: int, texts: Sequence[str]) -> str:
    return name if len(texts) == 1 else f"{name}[{number}]"


def _renamed(error: InvalidRequestError, name_of: Callable[[int], str]) -> InvalidRequestError:
    found = _INPUT.fullmatch(error.param or "")
    if found is None or error.param is None:
        return error
    param = name_of(int(found[1] or 0))
    renamed = type(error)(str(error).replace(error.param, param), param)
    renamed.code = error.code
    return renamed
