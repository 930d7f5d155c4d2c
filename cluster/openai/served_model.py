"""What a front end must know of the model that it serves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of an app.

    model_id: the id that clients use. max_model_len: tokens of prompt + output of one sequence.
    vocab_size: token ids from clients must be below it (the width of the logits).
    kv_capacity: tokens that the KV cache of one replica holds; None = not known, not checked here.
    created: seconds since the epoch.
    """

    model_id: str
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    kv_capacity: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def longest_sequence(self) -> int:
        """Most tokens that prompt and output of one sequence may have together."""
        return min(self.max_model_len, self.kv_capacity or self.max_model_len)
