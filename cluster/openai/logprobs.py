"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cluster.openai.deltas import PlacedLogprob
from engine.report import TokenLogprob
from engine.text.tokenizer import Tokenizer

LOWEST = -9999.0  # what OpenAI sends for a probability of zero: JSON has no infinity


def chat_logprobs(placed: Sequence[PlacedLogprob], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """Chat format: an entry for each token, each with its `top` best alternatives, and the bytes of all of them."""
    content = []
    for one in placed:
        entry = _chat_entry(one.logprob.token_id, one.logprob.logprob, tokenizer)
        entry["top_logprobs"] = [_chat_entry(token, value, tokenizer) for token, value in one.logprob.top[:top]]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(placed: Sequence[PlacedLogprob], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """Completions format: parallel lists. The chosen token is always among its own alternatives.

    The first token of an echoed prompt has null. With a `top` of 0 it is the only one there.
    """
    logprobs = [(one.logprob, one.told) for one in placed]
    return {
        "tokens": [_name(one.token_id, tokenizer) for one, _ in logprobs],
        "token_logprobs": [_finite(one.logprob) if told else None for one, told in logprobs],
        "top_logprobs": [
            {
                _name(token, tokenizer): _finite(value)
                for token, value in (*one.top[:top], (one.token_id, one.logprob))
            }
            if told
            else None
            for one, told in logprobs
        ],
        "text_offset": [one.text_offset for one in placed],
    }


def prompt_logprobs(
    scored: Sequence[TokenLogprob], tokenizer: Tokenizer, top: int
) -> Iterator[dict[str, Any] | None]:
    """vLLM's format: null for the first token of the prompt, then an object from ids to log-probabilities each.

    The prompt's own token comes first. rank: 1 is the most likely; of equals each has the last place.
    """
    yield None
    for one in scored:
        yield _ranked(one, tokenizer, top)


def _ranked(one: TokenLogprob, tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    best = {token: (value, rank) for rank, (token, value) in enumerate(one.top[:top], 1)}
    own = {one.token_id: best.get(one.token_id, (one.logprob, one.rank))}
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token).decode(errors="replace"),
        }
        for token, (value, rank) in {**own, **best}.items()
    }


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    return {"token": spelled.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(spelled)}


def _name(token_id: int, tokenizer: Tokenizer) -> str:
    """The token's text; one that is half a character is spelled `bytes:\\xf0\\x9f`, as OpenAI does."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in spelled])


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST
