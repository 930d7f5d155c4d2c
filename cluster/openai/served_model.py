"""What a front end must know of the model that it serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.openai.parsers.reasoning import ReasoningParser
from cluster.openai.parsers.tool_parser import ToolParser
from engine.request import Pooling
from engine.sampling_params import MAX_LOGPROBS
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of an app.

    model_id: the id that answers show. aliases: other names by which clients may ask for it.
    max_model_len: tokens of prompt + output of one sequence.
    vocab_size: token ids from clients must be below it (the width of the logits).
    kv_capacity: tokens that the KV cache of one replica holds; None = not known, not checked here.
    created: seconds since the epoch.
    tool_parser: of the calls that it writes when it is free to; None = `tool_choice` "auto" is refused.
    reasoning_parser: of what it thinks before it answers; None = thinking is part of the content.
    pooling: how the states of a text become its embedding, where a request does not say.
    by_priority: whether requests run by their priority; where not, one that is set is refused.
    strict_fields: whether fields that only hint, and have no use here, are refused.
    max_logprobs: most alternatives of a token that are told; -1 = all of the vocabulary.
    sampling_defaults: fields of `SamplingParams` that hold where a request does not say; no request gets more tokens
        than `max_tokens` there.
    matryoshka: lengths to which its embeddings may be cut, () = any; None = it was not trained for that.
    """

    model_id: str
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    kv_capacity: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    tool_parser: type[ToolParser] | None = None
    reasoning_parser: type[ReasoningParser] | None = None
    pooling: Pooling = "last"
    matryoshka: tuple[int, ...] | None = None
    by_priority: bool = True
    strict_fields: bool = False
    max_logprobs: int = MAX_LOGPROBS
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which clients may ask for it."""
        return (self.model_id, *self.aliases)

    @property
    def longest_sequence(self) -> int:
        """Most tokens that prompt and output of one sequence may have together."""
        return min(self.max_model_len, self.kv_capacity or self.max_model_len)


def matryoshka_of(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return `ServedModel.matryoshka` as a checkpoint's config.json says it.

    Source: vLLM's names, `is_matryoshka` and `matryoshka_dimensions`; A. Kusupati et al., "Matryoshka Representation
    Learning", 2022.
    """
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes and all(type(size) is int and size > 0 for size in sizes):
        return tuple(sorted(sizes))
    return () if config.get("is_matryoshka") is True else None
