"""What is known of every running sequence, in arrays that live across steps. One row per slot."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from engine.report import Ints


class Tables:
    """Tokens, blocks and counts by slot (S slots, contexts of M tokens, K blocks). A free slot is all zeros.

    tokens: prompt and output so far; what lies beyond `num_tokens` is zero.
    blocks: physical block of each logical block; 0 = none.
    num_prompt / num_tokens / num_computed: prompt; prompt + output; tokens whose K/V are in the cache.
    limits: `num_tokens` at which the sequence must end.
    capacity: tokens that its blocks hold.
    """

    def __init__(self, num_slots: int, context_len: int, blocks_per_seq: int) -> None:
        self.tokens: Ints = np.zeros((num_slots, context_len), "<i4")  # [S, M]
        self.blocks: Ints = np.zeros((num_slots, blocks_per_seq), np.int32)  # [S, K]
        self.num_prompt: Ints = np.zeros(num_slots, np.int32)
        self.num_tokens: Ints = np.zeros(num_slots, np.int32)
        self.num_computed: Ints = np.zeros(num_slots, np.int32)
        self.limits: Ints = np.zeros(num_slots, np.int32)
        self.capacity: Ints = np.zeros(num_slots, np.int32)
        self.flat_tokens: Ints = self.tokens.reshape(-1)  # [S * M], a view
        self.flat_blocks: Ints = self.blocks.reshape(-1)  # [S * K], a view

    @property
    def num_slots(self) -> int:
        """Rows."""
        return self.tokens.shape[0]

    @property
    def context_len(self) -> int:
        """Columns of the token table."""
        return self.tokens.shape[1]

    def fill(self, slot: int, prompt: Items[int], outputs: Items[int], limit: int) -> None:
        """Write a sequence that is admitted: the whole prompt at once, and the outputs known from before."""
        total = len(prompt) + len(outputs)
        self.num_prompt[slot] = len(prompt)
        self.num_tokens[slot] = total  # before the tokens: `clear` must find them even if writing them fails
        self.limits[slot] = limit
        self.tokens[slot, : len(prompt)] = prompt
        self.tokens[slot, len(prompt) : total] = outputs

    def copy_tokens(self, source: int, target: int) -> None:
        """Write the sequence in slot `source` into slot `target` as well, without its blocks."""
        total = self.num_tokens[source]
        self.tokens[target, :total] = self.tokens[source, :total]
        for counts in (self.num_prompt, self.num_tokens, self.limits):
            counts[target] = counts[source]

    def copy_blocks(self, source: int, target: int, count: int) -> None:
        """Let slot `target` see the first `count` blocks of slot `source`, and all that is computed in them."""
        self.blocks[target, :count] = self.blocks[source, :count]
        self.num_computed[target] = self.num_computed[source]
        self.capacity[target] = self.capacity[source]

    def outputs(self, slot: int) -> list[int]:
        """Return the tokens generated so far."""
        return self.tokens[slot, self.num_prompt[slot] : self.num_tokens[slot]].tolist()

    def clear(self, slot: int) -> None:
        """Zero the row, so that nothing of its sequence can reach the next one."""
        self.tokens[slot, : self.num_tokens[slot]] = 0
        self.blocks[slot] = 0
        for counts in (self.num_prompt, self.num_tokens, self.num_computed, self.limits, self.capacity):
            counts[slot] = 0
