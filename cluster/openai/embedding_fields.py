"""What clients may send to `POST /v1/embeddings`.

Source: OpenAI API reference, "create embeddings"; `pooling` is ours, the other extras are those of completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.openai.field_types import Fields, Label, Prompt, note
from cluster.openai.refusals import SENT_ANYWHERE, Refusal
from engine.request import Pooling

MAX_INPUTS = 2048
_MAX = 2**31 - 1
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_INPUTS}
_KINDS = "must be a string, a list of strings, a list of token ids, or a list of such lists"


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


REFUSED_EMBEDDING: Mapping[str, Refusal] = {
    **SENT_ANYWHERE,
    "normalize": Refusal((True,), "embeddings always have length 1"),
    "truncate_prompt_tokens": Refusal((), "cut the input yourself: what is left out changes its meaning"),
    "messages": Refusal((), "render them with the chat template and send the text as input"),
}
