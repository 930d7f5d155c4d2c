"""What offline generation returns."""

from __future__ import annotations

from dataclasses import dataclass

from engine.report import TokenLogprob


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of a request.

    token_ids: all tokens generated, the stop token or the token that completed a stop string included. text: what
    they say, without the stop unless the request wants it. finish_reason: "stop", "length", or "error" when the
    engine failed on this request alone (its log says why). logprobs: one per token, None when not asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities, None when they were not asked for."""
        if self.logprobs is None:
            return None
        return sum([one.logprob for one in self.logprobs])


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its `n` choices, in order. prompt: the text, None when token ids were given.

    num_cached_tokens: prompt tokens that came from the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
