"""Sampling parameters by slot, written once at admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.report import Floats, Ints
from engine.request import Sequence
from engine.sampling_params import SamplingParams

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class Rules:
    """What a sequence may draw, as arrays made once.

    Bad words are apart by length. banned: those of one token. pairs: of two, first and last. longer: the others, by
    their last token but two.
    """

    biases: tuple[Ints, Floats] | None = None
    allowed: Ints | None = None
    banned: Ints | None = None
    pairs: tuple[Ints, Ints] | None = None
    longer: Mapping[int, list[tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, params: SamplingParams) -> Rules:
        """Return the rules of `params`; `NO_RULES` itself when there are none."""
        if not (params.logit_bias or params.allowed_token_ids or params.bad_words_ids):
            return NO_RULES
        ids, biases = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        banned = [word[0] for word in params.bad_words_ids if len(word) == 1]
        firsts, lasts = np.array([word for word in params.bad_words_ids if len(word) == 2], np.int32).reshape(-1, 2).T
        longer: dict[int, list[tuple[int, ...]]] = {}
        for word in params.bad_words_ids:
            if len(word) > 2:
                longer.setdefault(word[-3], []).append(word)
        return cls(
            (np.array(ids, np.int32), np.array(biases, np.float32)) if ids else None,
            np.array(params.allowed_token_ids, np.int32) if params.allowed_token_ids else None,
            np.array(banned, np.int32) if banned else None,
            (firsts, lasts) if firsts.size else None,
            longer,
        )


NO_RULES = Rules()


class SamplingTable:
    """One row of parameters per slot. [S] each."""

    def __init__(self, num_slots: int) -> None:
        self.temperature: Floats = np.zeros(num_slots, np.float32)
        self.top_k: Ints = np.zeros(num_slots, np.int32)
        self.top_p: Floats = np.ones(num_slots, np.float32)
        self.min_p: Floats = np.zeros(num_slots, np.float32)
        self.seeds: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.choices: Ints = np.zeros(num_slots, np.int32)
        self.repetition_penalty: Floats = np.ones(num_slots, np.float32)
        self.presence_penalty: Floats = np.zeros(num_slots, np.float32)
        self.frequency_penalty: Floats = np.zeros(num_slots, np.float32)
        self.penalised: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.num_logprobs: Ints = np.full(num_slots, NO_LOGPROBS, np.int32)
        self.whole_rows: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)  # wants log-probabilities of any token
        self.stops_from: Ints = np.zeros(num_slots, np.int32)  # position before which no stop id may be drawn
        self.stop_ids: list[tuple[int, ...]] = [()] * num_slots
        self.ruled: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)  # has a bias, allowed ids or bad words
        self.structured: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.rules: list[Rules] = [NO_RULES] * num_slots

    def write(self, slot: int, sequence: Sequence, stop_ids: tuple[int, ...]) -> None:
        """Fill a row. stop_ids: what would end the sequence, kept away until it has `min_tokens`."""
        params = sequence.request.params
        self.temperature[slot] = 0.0 if params.greedy else params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seeds[slot] = sequence.request.seed
        self.choices[slot] = sequence.index
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.penalised[slot] = self._changes_logits(slot)
        self.whole_rows[slot] = whole = params.whole_rows
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else 0 if whole else params.logprobs
        self.stops_from[slot] = sequence.num_prompt_tokens + params.min_tokens if stop_ids else 0
        self.stop_ids[slot] = stop_ids
        self.rules[slot] = rules = Rules.of(params)
        self.ruled[slot] = rules is not NO_RULES
        self.structured[slot] = sequence.grammar is not None

    def _changes_logits(self, slot: int) -> bool:
        """Whether a slot has a penalty. Asked of what fp32 kept: a penalty of 1e-50 is none."""
        added = self.presence_penalty[slot] or self.frequency_penalty[slot]
        return bool(self.repetition_penalty[slot] != 1 or added)
