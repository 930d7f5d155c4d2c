"""Whether the engine can run a request to its end; checked before anything changes."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.errors import InvalidRequestError, PromptTooLongError, context_words
from engine.request import Request
from engine.sampling_params import ALL_LOGPROBS


class Admission:
    """The limits of one engine. `check` refuses what exceeds them, naming the field and a value that works.

    kv_tokens: tokens that the whole KV cache holds.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, kv_tokens: int) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._max_model_len = config.context_len
        self._kv_tokens = kv_tokens
        self._vocab_size = vocab_size
        self._max_logprobs = vocab_size if config.max_logprobs == ALL_LOGPROBS else config.max_logprobs

    def limit(self, request: Request) -> int:
        """Return the number of tokens, prompt included, at which each sequence of `request` ends."""
        room = min(self._max_model_len, self._kv_tokens)
        wanted = request.params.max_tokens
        return room if wanted is None else min(room, len(request.prompt_token_ids) + wanted)

    def check(self, request: Request) -> None:
        """Raise `InvalidRequestError` or `PromptTooLongError` unless `request` can run alone to its end."""
        _check_fields(request)
        self._check_tokens(request.prompt_token_ids, "prompt")
        self._check_params(request)
        if request.params.n > self._max_num_seqs:
            raise InvalidRequestError(
                f"n={request.params.n} exceeds the {self._max_num_seqs} sequences that run at once (max_num_seqs)",
                "n",
            )
        self._check_length(request)
        if request.resume is not None:
            self._check_resume(request, request.resume)

    def _check_params(self, request: Request) -> None:
        params = request.params
        self._check_tokens(params.stop_token_ids, "stop_token_ids")
        self._check_tokens(params.allowed_token_ids, "allowed_token_ids")
        self._check_tokens([token for token, _ in params.logit_bias], "logit_bias")
        self._check_tokens(params.logprob_token_ids, "logprob_token_ids")
        if params.num_alternatives(self._vocab_size) > self._max_logprobs and not params.logprob_token_ids:
            raise InvalidRequestError(
                f"logprobs must be at most {self._max_logprobs}, not {params.logprobs} (max_logprobs)", "logprobs"
            )
        for word in params.bad_words_ids:
            self._check_tokens(word, "bad_words")
        if params.bad_words and not params.bad_words_ids:
            raise InvalidRequestError(
                "bad_words came without their tokens; give the parameters to Tokenizer.with_bad_words first",
                "bad_words",
            )
        if request.pooling is not None and params.n != 1:
            raise InvalidRequestError(f"n must be 1 where no tokens are drawn, not {params.n}", "n")

    def _check_tokens(self, tokens: Items[int], param: str) -> None:
        if not tokens:
            return
        ids = np.asarray(tokens)
        if ids.dtype.kind != "i" or ids.ndim != 1:
            raise InvalidRequestError(f"{param} must hold integer token ids", param, "invalid_type")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequestError(
                f"{param} holds token id {wrong}; the vocabulary has ids 0 to {self._vocab_size - 1}", param
            )

    def _check_length(self, request: Request) -> None:
        prompt, params = len(request.prompt_token_ids), request.params
        if not prompt:
            raise InvalidRequestError("prompt must hold at least one token", "prompt")
        for room, of_cache in ((self._max_model_len, False), (self._kv_tokens, True)):
            left, words = room - prompt, context_words(room, of_cache)
            if left < 1:
                raise PromptTooLongError(
                    f"{words}the prompt has {prompt} tokens, and at most {room - 1} fit beside one of output"
                )
            for name, wanted in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
                if wanted is not None and wanted > left:
                    raise PromptTooLongError(
                        f"{words}{name}={wanted} does not fit: at most {left} fit after a prompt of {prompt} tokens",
                        name,
                    )

    def _check_resume(self, request: Request, resume: dict[int, tuple[int, ...]]) -> None:
        if not resume:
            raise InvalidRequestError("resume must name at least one choice; leave it out to start anew", "resume")
        longest = self.limit(request) - len(request.prompt_token_ids) - 1
        for choice, tokens in resume.items():
            if not _is_integer(choice) or not 0 <= choice < request.params.n:
                raise InvalidRequestError(f"resume names choice {choice!r}; n={request.params.n}", "resume")
            self._check_tokens(tokens, "resume")
            if len(tokens) > longest:
                raise InvalidRequestError(
                    f"choice {choice} is complete: resume has {len(tokens)} tokens, at most {longest} leave work",
                    "resume",
                )


def _check_fields(request: Request) -> None:
    if not isinstance(request.request_id, str) or not request.request_id:
        raise InvalidRequestError("request_id must be a non-empty string", "request_id", "invalid_type")
    if not isinstance(request.cache_salt, bytes):
        raise InvalidRequestError("cache_salt must be bytes", "cache_salt", "invalid_type")
    if not _is_integer(request.seed) or not -(2**63) <= request.seed < 2**63:
        raise InvalidRequestError(f"seed must be an integer of 64 bits with sign, not {request.seed!r}", "seed")
    if not _is_integer(request.priority):
        raise InvalidRequestError(
            f"priority must be an integer, not {request.priority!r}", "priority", "invalid_type"
        )
    arrival = request.arrival_time
    if arrival is not None and not (isinstance(arrival, int | float) and math.isfinite(arrival)):
        raise InvalidRequestError(f"arrival_time must be finite seconds, not {arrival!r}", "arrival_time")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
