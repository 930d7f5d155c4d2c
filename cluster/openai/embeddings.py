"""`POST /v1/embeddings`: the final hidden states of a decoder, pooled over each input and normalised to length 1."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from msgspec import Raw, json
from numpy.typing import NDArray

from cluster.errors import ApiError
from cluster.openai.checking import check_priority, checked_fields, refuse_other_models
from cluster.openai.embedding_fields import REFUSED_EMBEDDING, EmbeddingFields
from cluster.openai.field_types import Prompt
from cluster.openai.hints import Hints
from cluster.openai.served_model import ServedModel
from cluster.tasks import first_error
from cluster.telemetry.metrics import RequestTrack
from cluster.token_source import TokenSource
from engine.errors import InvalidRequestError, PromptTooLongError, context_words
from engine.request import Request
from engine.sampling_params import SamplingParams

MAX_AT_ONCE = 64  # inputs of one call that run at a time: one call must not fill the queues of all replicas
MANY_NUMBERS = 32_768
_MAX_SALT_BYTES = 256
_NOTHING = SamplingParams(max_tokens=1)
Vector = NDArray[np.float32]


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
    salt = (checked.cache_salt or "").encode()
    if len(salt) > _MAX_SALT_BYTES:
        raise InvalidRequestError(f"cache_salt may have at most {_MAX_SALT_BYTES} bytes", "cache_salt")
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
    except* Exception as errors:
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
    if len(ids) >= model.longest_sequence:
        words = context_words(model.longest_sequence, model.longest_sequence < model.max_model_len)
        raise PromptTooLongError(
            f"{words}{param} has {len(ids)} tokens; at most {model.longest_sequence - 1} can be embedded: split it",
            param,
        )
    return tuple(ids)


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
