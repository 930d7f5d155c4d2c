"""What a caller may ask of the sampler. Names and meanings follow vLLM's `SamplingParams`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequestError

MAX_N = 16
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_BYTES = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request; validated on construction.

    `temperature=0` is greedy. `top_k=0` (or -1) and `top_p=1` switch those filters off. `max_tokens=None` means
    as many as the context holds. `seed=None` lets the server choose one. `logprobs=k` returns the chosen token's
    log-probability and the k best. Log-probabilities are those of the raw logits, before temperature and penalties.

    Raises `InvalidRequestError` naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _check_integer("n", self.n, 1, MAX_N)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}", "min_tokens"
                )
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r}", name, "invalid_type")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, not {value}", name)


def _check_number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, not {value!r}", name, "invalid_type")
    if not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value}", name)
    if not low <= value <= high or (low_open and value == low):
        above = "above" if low_open else "at least"
        raise InvalidRequestError(f"{name} must be {above} {low:g} and at most {high:g}, not {value}", name)


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop takes at most {MAX_STOPS} strings, not {len(stops)}", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InvalidRequestError(f"stop must hold non-empty strings, not {stop!r}", "stop", "invalid_type")
        if len(stop.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequestError(f"each stop string may have at most {MAX_STOP_BYTES} bytes", "stop")
    return stops


def _token_ids(value: Sequence[int] | None) -> tuple[int, ...]:
    ids = tuple(value or ())
    if len(ids) > 1024:
        raise InvalidRequestError(f"stop_token_ids takes at most 1024 ids, not {len(ids)}", "stop_token_ids")
    for token in ids:
        _check_integer("stop_token_ids", token, 0, 2**31 - 1)
    return ids
