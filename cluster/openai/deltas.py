"""What is new in one choice of an answer, on its way from tokens to frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.openai.tools.deltas import CallDelta
from engine.report import TokenLogprob


@dataclass(frozen=True, slots=True)
class PlacedLogprob:
    """Log-probabilities of one token, and the character of the choice's text at which the token begins.

    told: False for the first token of a prompt, which has no log-probability.
    """

    logprob: TokenLogprob
    text_offset: int
    told: bool = True


@dataclass(slots=True)
class Delta:
    """What is new in one choice. `finish_reason` comes with its last delta; the text may be empty in any.

    calls and reasoning: what of the text was found to be calls of tools, or thoughts before the answer.
    """

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PlacedLogprob] = ()
    finish_reason: str | None = None
    calls: Sequence[CallDelta] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole call, as it is billed: every token generated counts, shown or not.

    cached_tokens: of the prompts, found in a prefix cache; None = not told. reasoning_tokens: those of the output
    that were thinking; None where thinking is not told apart.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    reasoning_tokens: int | None = None
