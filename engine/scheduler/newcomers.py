"""Who may join the next step, and with how many tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.config import EngineConfig
from engine.report import Ints
from engine.request import Request, Sequence
from engine.scheduler.boundary import Boundary
from engine.scheduler.roster import Roster
from engine.scheduler.rows import Rows
from engine.telemetry.flight import Wait, WaitLog

Limit = Callable[[Request], int]


@dataclass(slots=True)
class Arrivals:
    """Figures since start of the sequences that joined."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True)
class _Blocked:
    """The head of the queue that did not fit.

    found: leading blocks of its that were in the prefix cache. wanted: blocks that it waits for. Others may compute
    and seal more of its prefix meanwhile; what is evicted of it shows when there seems to be room enough.
    """

    sequence: Sequence
    found: int
    wanted: int


class Newcomers:
    """Lets waiting sequences join while budget, slots and blocks last, in the order in which they wait."""

    def __init__(
        self, config: EngineConfig, rows: Rows, roster: Roster, boundary: Boundary, waits: WaitLog, limit: Limit
    ) -> None:
        """limit: the number of tokens at which each sequence of a request ends."""
        self.arrivals = Arrivals()
        self.begun: list[Request] = []  # that joined for the first time, until somebody takes note
        self._rows = rows
        self._tables = rows.tables
        self._roster = roster
        self._boundary = boundary
        self._waits = waits
        self._limit = limit
        self._budget = config.max_num_batched_tokens
        self._chunk = config.long_prefill_token_threshold or self._budget
        self._blocked: _Blocked | None = None

    def admit(self, query_lens: Ints) -> Ints:
        """Let sequences join a step in which `query_lens` are taken already. Returns all query lengths."""
        budget = self._budget - int(query_lens.sum())
        granted: list[int] = []
        promised = sum(map(self._missing_blocks, self._roster.prefilling))
        while budget > 0 and (sequence := self._roster.waiting.peek()) is not None:
            grant = self._boundary.guard(sequence, self._join, sequence, budget, promised)
            if grant is None:
                self._boundary.bury()
                continue
            if not grant:
                break
            granted.append(grant)
            budget -= grant
            promised += self._missing_blocks(sequence)
        if budget <= 0 and (head := self._roster.waiting.peek()) is not None:
            self._waits.head_waits(head.request, Wait.BUDGET, lambda: f"all {self._budget} tokens of a step")
        if self._roster.waiting:
            self._waits.others_wait()
        return np.concatenate([query_lens, np.array(granted, np.int32)]) if granted else query_lens

    def _missing_blocks(self, sequence: Sequence) -> int:
        return self._rows.blocks_for(sequence.num_tokens) - len(sequence.block_table)

    def _join(self, sequence: Sequence, budget: int, promised: int) -> int:
        """Place `sequence` and return how many tokens it may compute in this step; 0 if it does not fit yet.

        promised: blocks that sequences in the middle of their prompts have still to take.
        """
        siblings = self._roster.siblings.get(sequence, [])
        request = sequence.request
        if self._rows.num_free_slots <= len(siblings):
            self._waits.head_waits(request, Wait.SLOTS, lambda: f"all {self._tables.num_slots} are taken")
            return 0
        prefix = self._fitting_prefix(sequence, promised, len(siblings))
        if prefix is None:
            self._waits.head_waits(request, Wait.BLOCKS, lambda: self._lack(sequence))
            return 0
        self._rows.place(sequence, siblings, prefix, self._limit(request))
        if not sequence.preemptions:
            self._count_arrival(sequence)
            self.begun.append(request)
        grant = min(sequence.num_tokens - sequence.num_computed_tokens, self._chunk, budget)
        self._rows.grow(sequence, sequence.num_computed_tokens + grant)
        self._roster.start(sequence, self._waits.now)
        self._waits.starts(request, sequence.arrival_time, bool(sequence.preemptions))
        return grant

    def _lack(self, sequence: Sequence) -> str:
        wanted, room = self._rows.blocks_for(sequence.num_tokens), self._rows.blocks.num_available
        return f"{wanted} for its tokens so far; {room} are free, some of them promised to those that run"

    def _fitting_prefix(self, sequence: Sequence, promised: int, num_siblings: int) -> list[int] | None:
        """Return the cached blocks to start with, or None if what is free does not hold the rest of `sequence`.

        While others run, one more block for each of them stays free, so that a newcomer is not preempted at once.
        """
        blocks = self._rows.blocks
        room = blocks.num_available - promised
        if self._roster.running:
            room -= self._tables.num_slots - self._rows.num_free_slots + num_siblings
        if self._still_blocked(sequence, room):
            return None
        prefix = self._rows.find_prefix(sequence)
        wanted = self._rows.blocks_for(sequence.num_tokens) - len(prefix) + blocks.count_idle(prefix)
        self._blocked = _Blocked(sequence, len(prefix), wanted) if room < wanted else None
        return prefix if self._blocked is None else None

    def _still_blocked(self, sequence: Sequence, room: int) -> bool:
        """Whether `sequence` did not fit before and `room` is still too little, with what others sealed since.

        Looks only at blocks behind those that were found, so that a long prompt costs no more than a short one.
        """
        blocked = self._blocked
        if blocked is None or blocked.sequence is not sequence:
            return False
        gained = self._rows.extend_prefix(sequence, blocked.found)
        if gained:
            blocked.found += len(gained)
            blocked.wanted -= len(gained) - self._rows.blocks.count_idle(gained)
        return room < blocked.wanted

    def _count_arrival(self, sequence: Sequence) -> None:
        hit = sequence.num_computed_tokens
        if sequence.is_first:  # what the others find is this one's
            sequence.num_cached_tokens = min(hit, sequence.num_prompt_tokens)
        self.arrivals.prompt_tokens += sequence.num_prompt_tokens
        if self._rows.blocks.enable_prefix_caching:
            self.arrivals.prefix_query_tokens += sequence.num_tokens
            self.arrivals.prefix_hit_tokens += hit
