"""`POST /v1/embeddings`: the final hidden states of a decoder, pooled over each input and normalised to length 1.

Source: OpenAI API reference, "create embeddings"; `pooling` is ours, the other extras are those of completions.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import numpy as np
from msgspec import Raw, json
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.errors import ApiError
from cluster.openai.body import checked_fields
from cluster.openai.fields import Fields, Hints, Label, Prompt, note
from cluster.openai.refusals import SENT_ANYWHERE, Refusal
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import check_priority, checked_salt, refuse_other_models
from cluster.tasks import first_error
from cluster.telemetry.metrics import RequestTrack
from cluster.token_source import TokenSource
from engine.errors import InvalidRequestError, PromptTooLongError, context_words
from engine.request import Pooling, Request
from engine.sampling_params import SamplingParams

MAX_INPUTS = 2048
_MAX = 2**31 - 1
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_INPUTS}
_KINDS = "must be a string, a list of strings, a list of token ids, or a list of such lists"
REFUSED_EMBEDDING: Mapping[str, Refusal] = {
    **SENT_ANYWHERE,
    "normalize": Refusal((True,), "embeddings always have length 1"),
    "messages": Refusal((), "render them with the chat template and send the text as input"),
}
TruncationSide = Literal["left", "right"]
TRUNCATION = "keep so many tokens of each text, its special ones included; -1: as many as can be embedded"
SIDE = "right: what is beyond them is left out (the default); left: what is before"
MAX_AT_ONCE = 64  # inputs of one call that run at a time: one call must not fill the queues of all replicas
MANY_NUMBERS = 32_768
_NOTHING = SamplingParams(max_tokens=1)
Vector = NDArray[np.float32]


def _inputs(value: Any) -> list[Prompt]:
    inputs = value if isinstance(value, list) and value and type(value[0]) is not int else [value]
    if len(inputs) > MAX_INPUTS:
        raise PydanticCustomError("input_count", f"must hold at most {MAX_INPUTS} inputs, not {len(inputs)}")
    texts = isinstance(inputs[0], str)
    if not all(isinstance(one, str) if texts else _is_ids(one) for one in inputs):
        raise PydanticCustomError("input_type", _KINDS)
    return inputs


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


Inputs = Annotated[
    list[Any],
    BeforeValidator(_inputs),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, {**_TEXTS, "items": _IDS}]}),
]


class EmbeddingFields(Fields):
    """`POST /v1/embeddings`."""

    model: str = Field(description="a name of a served model; GET /v1/models lists them")
    input: Inputs = Field(description=f"a text, token ids, or up to {MAX_INPUTS} of either; none of them empty")
    encoding_format: Literal["float", "base64"] = note("base64: float32, little-endian", default="float")
    dimensions: int | None = note("where the model was trained to be cut (Matryoshka), else 400", 1, _MAX)
    user: Label | None = note("a label: changes nothing, is not stored")
    pooling: Pooling | None = note(
        "last: the state of the last token; mean: of all; default: the server's --embedding-pooling"
    )
    add_special_tokens: bool = note("whether the tokenizer adds its own (BOS)", default=True)
    priority: int = note(
        "smaller runs earlier; where the server does not schedule by priority, only 0", -_MAX, _MAX, default=0
    )
    cache_salt: str | None = note("only requests with the same salt share cached prefixes; at most 256 bytes")
    truncate_prompt_tokens: int | None = note(TRUNCATION, -1, _MAX)
    truncation_side: TruncationSide | None = note(SIDE)


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """One accepted call: a request for each input, in order, and how to answer.

    dimensions: length to cut the vectors to, None = whole. ignored: fields of the client's that had no use.
    """

    request_id: str
    requests: tuple[Request, ...]
    encoding: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    ignored: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs."""
        return sum([len(request.prompt_token_ids) for request in self.requests])


def embedding_call(fields: Mapping[str, Any], model: ServedModel) -> EmbeddingCall:
    """Check and tokenize a call; raises `ApiError` or `InvalidRequestError` that names the first wrong field."""
    hints = Hints(model.strict_fields)
    checked = checked_fields(EmbeddingFields, fields, REFUSED_EMBEDDING, hints)
    refuse_other_models(checked.model, model)
    _check_dimensions(checked.dimensions, model)
    check_priority(checked.priority, model)
    salt = checked_salt(checked.cache_salt)
    request_id = f"embd-{secrets.token_hex(16)}"
    single = len(checked.input) == 1
    requests = [
        Request(
            request_id=f"{request_id}-{i}",
            prompt_token_ids=_token_ids(one, "input" if single else f"input[{i}]", checked, model),
            params=_NOTHING,
            priority=checked.priority,
            cache_salt=salt,
            pooling=checked.pooling or model.pooling,
        )
        for i, one in enumerate(checked.input)
    ]
    return EmbeddingCall(request_id, tuple(requests), checked.encoding_format, checked.dimensions, hints.names)


def finished_vector(state: Sequence[float], dimensions: int | None) -> Vector:
    """Return a pooled state as clients get it, [dimensions or hidden]: cut, then of length 1.

    Raises `InvalidRequestError` when `dimensions` is more than there are.
    """
    vector = np.asarray(state, np.float64)
    if dimensions is not None and dimensions > len(vector):
        raise InvalidRequestError(
            f"dimensions must be at most {len(vector)}, the hidden size of this model, not {dimensions}", "dimensions"
        )
    vector = vector[:dimensions]
    length = float(np.linalg.norm(vector))
    return (vector / length if length else vector).astype(np.float32)


async def embedded(call: EmbeddingCall, source: TokenSource, track: RequestTrack) -> list[Vector]:
    """Run the requests, some at a time; the first error ends them all and is raised, by the client's field."""
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(number: int, request: Request) -> Vector:
        async with places:
            vector = finished_vector(await _pooled(request, source), call.dimensions)
        track.ended(number, "stop")
        return vector

    reason = "abort"
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(i, request)) for i, request in enumerate(call.requests)]
    except ExceptionGroup as errors:  # not `except*`: Python 3.11.2 wraps what is raised there in another group
        reason = "error"
        raise _clients_error(first_error(errors)) from None
    finally:
        track.close(reason)
    return [task.result() for task in tasks]


def _clients_error(error: BaseException) -> BaseException:
    if isinstance(error, ApiError | InvalidRequestError) and error.param == "prompt":
        error.param = "input"
    return error


async def _pooled(request: Request, source: TokenSource) -> tuple[float, ...]:
    """Return the pooled state, [hidden]."""
    chunks = cast("AsyncGenerator[Any, None]", source.generate(request))
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.embedding is not None:
                state: tuple[float, ...] = chunk.embedding
                return state
    raise RuntimeError("the token source ended without an embedding")


async def whole_answer(call: EmbeddingCall, vectors: Sequence[Vector], model_id: str) -> bytes:
    """Return the body of the answer, made beside the event loop where it holds many numbers."""
    if has_many(vectors):
        return await asyncio.to_thread(answer_body, call, vectors, model_id)
    return answer_body(call, vectors, model_id)


def has_many(vectors: Sequence[Vector]) -> bool:
    """Whether writing all numbers of an answer takes milliseconds: worth a thread. It may take seconds."""
    return sum([len(vector) for vector in vectors]) > MANY_NUMBERS


def answer_body(call: EmbeddingCall, vectors: Sequence[Vector], model_id: str) -> bytes:
    """Return the body of the answer, as JSON.

    It is written vector by vector, for other threads get no turn while one long text is encoded.
    """
    encoded = (_base64(vector) if call.encoding == "base64" else vector.tolist() for vector in vectors)
    data = [json.encode({"object": "embedding", "index": i, "embedding": one}) for i, one in enumerate(encoded)]
    usage = {"prompt_tokens": call.num_tokens, "total_tokens": call.num_tokens}
    body = {"object": "list", "data": Raw(b"[" + b",".join(data) + b"]"), "model": model_id, "usage": usage}
    return json.encode(body)


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _token_ids(text: Prompt, param: str, checked: EmbeddingFields, model: ServedModel) -> tuple[int, ...]:
    if not text:
        raise InvalidRequestError(f"{param} is empty: it must give at least one token", param)
    if isinstance(text, str):
        ids = model.tokenizer.encode(text, add_special_tokens=checked.add_special_tokens, param=param)
    else:
        ids = text
        wrong = next((token for token in ids if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"{param} holds {wrong}, which is no token id of this model (0 to {model.vocab_size - 1})", param
            )
    if not ids:
        raise InvalidRequestError(f"{param} is empty: it must give at least one token", param)
    keep = _kept(checked.truncate_prompt_tokens, model)
    if keep is not None and len(ids) > keep:
        return _truncated(ids, text, keep, checked, model)
    if len(ids) >= model.longest_sequence:
        words = context_words(model.longest_sequence, model.longest_sequence < model.max_model_len)
        raise PromptTooLongError(
            f"{words}{param} has {len(ids)} tokens; at most {model.longest_sequence - 1} can be embedded: split it, "
            "or send truncate_prompt_tokens -1",
            param,
        )
    return tuple(ids)


def _kept(asked: int | None, model: ServedModel) -> int | None:
    """Return how many tokens of each text are kept at most, None = all; raises `InvalidRequestError`."""
    most = model.longest_sequence - 1
    if asked is None or asked == -1:
        return None if asked is None else most
    if not 1 <= asked <= most:
        message = f"truncate_prompt_tokens must be between 1 and {most}, or -1 for as many as can be, not {asked}"
        raise InvalidRequestError(message, "truncate_prompt_tokens")
    return asked


def _truncated(
    ids: Sequence[int], text: Prompt, keep: int, checked: EmbeddingFields, model: ServedModel
) -> tuple[int, ...]:
    """Return `keep` of the ids: of a text those that the tokenizer adds stay, as the last may be what is pooled."""
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    if isinstance(text, str) and checked.add_special_tokens:
        own = model.tokenizer.encode(text, add_special_tokens=False)
        added = len(ids) - len(own)
        for place in range(added + 1):
            if list(ids[place : place + len(own)]) == list(own) and added < keep:
                before, ids, after = ids[:place], own, ids[place + len(own) :]
                break
    room = keep - len(before) - len(after)
    kept = ids[-room:] if checked.truncation_side == "left" else ids[:room]
    return (*before, *kept, *after)


def _check_dimensions(dimensions: int | None, model: ServedModel) -> None:
    """Cutting a vector keeps its meaning only where the model was trained for it."""
    if dimensions is None:
        return
    if model.matryoshka is None:
        raise InvalidRequestError(
            "dimensions is not supported by this model, which was not trained to have its embeddings cut "
            "(is_matryoshka in its config.json); leave it out",
            "dimensions",
            "unsupported_parameter",
        )
    if dimensions < 1:
        raise InvalidRequestError(f"dimensions must be at least 1, not {dimensions}", "dimensions")
    if model.matryoshka and dimensions not in model.matryoshka:
        known = ", ".join(str(size) for size in model.matryoshka)
        raise InvalidRequestError(f"dimensions must be one of {known}, not {dimensions}", "dimensions")
