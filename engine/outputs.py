"""What offline generation returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.report import TokenLogprob


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of a request.

    token_ids: all tokens generated, the stop token or the token that completed a stop string included. text: what
    they say, without the stop unless the request wants it. finish_reason: "stop", "length", or "error" when the
    engine failed on this request alone (its log says why). stop_reason: the stop string or the id that ended it, None
    for the end of the text. logprobs: one per token, None when not asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities, None when they were not asked for."""
        if self.logprobs is None:
            return None
        return sum([one.logprob for one in self.logprobs])


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its `n` choices, in order. prompt: the text, None when token ids were given.

    num_cached_tokens: prompt tokens that came from the prefix cache. prompt_logprobs: one per prompt token, None for
    the first, which nothing comes before; None when not asked for. request_id: no part of what is compared. finished:
    always, as results come when they are.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    request_id: str = field(default="", compare=False)
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One prompt and its embedding, [hidden] fp32 of length 1. prompt: the text, None when token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int = 0


def normalised(vector: Sequence[float]) -> list[float]:
    """Return `vector` with length 1; zeros stay zeros."""
    length = math.sqrt(math.fsum([x * x for x in vector]))
    return [x / length for x in vector] if length else list(vector)
