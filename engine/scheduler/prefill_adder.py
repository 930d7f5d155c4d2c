"""Which waiting sequences join a step, and why the first of them cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.config import EngineConfig
from engine.events import Crowded, Events, Lack, Stalled, Started
from engine.report import Ints
from engine.request import Request, Sequence
from engine.scheduler.batch_state import BatchState
from engine.scheduler.slots import Slots
from engine.scheduler.update import FailureGuard

Limit = Callable[[Request], int]


@dataclass(slots=True)
class _Blocked:
    """The head of the queue that did not fit.

    found: its leading blocks that were in the prefix cache. wanted: blocks that it waits for. Others may compute and
    seal more of its prefix meanwhile; what is evicted of it shows when there seems to be room enough.
    """

    sequence: Sequence
    found: int
    wanted: int


class PrefillAdder:
    """Lets waiting sequences join a step, in order, while budget, slots and blocks last.

    limit: number of tokens at which each sequence of a request ends.
    begun: requests of which a sequence joined for the first time, until the scheduler takes the list.
    prompt_tokens / prefix_queries / prefix_hits: tokens since start, of sequences that joined for the first time.
    """

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        batch: BatchState,
        guard: FailureGuard,
        events: Events,
        limit: Limit,
    ) -> None:
        self.begun: list[Request] = []
        self.prompt_tokens = self.prefix_queries = self.prefix_hits = 0
        self._slots = slots
        self._pool = slots.pool
        self._num_slots = slots.tables.num_slots
        self._batch = batch
        self._guard = guard
        self._events = events
        self._limit = limit
        self._budget = config.token_budget
        self._chunk = config.long_prefill_token_threshold or self._budget
        self._blocked: _Blocked | None = None
        self._stalled: tuple[str, Lack] | None = None  # the last that was reported

    def add(self, query_lens: Ints, now: float) -> Ints:
        """Let sequences join a step. query_lens: of those that run. Returns all query lengths. now: seconds."""
        waiting, budget = self._batch.waiting, self._budget - int(query_lens.sum())
        granted: list[int] = []
        promised = sum(self._slots.missing_blocks(one, one.num_tokens) for one in self._batch.prefilling)
        while budget > 0 and (sequence := waiting.peek()) is not None:
            grant = self._guard.run(sequence, self._join, sequence, budget, promised, now)
            if grant is None:
                self._guard.end_failed()
                continue
            if not grant:
                break
            granted.append(grant)
            budget -= grant
            promised += self._slots.missing_blocks(sequence, sequence.num_tokens)
        if budget <= 0 and (head := waiting.peek()) is not None:
            self._stall(head.request, now, Lack.BUDGET, lambda: f"all {self._budget} tokens of a step")
        if waiting:
            self._events.emit(Crowded(now))
        return np.concatenate([query_lens, np.array(granted, np.int32)]) if granted else query_lens

    def _join(self, sequence: Sequence, budget: int, promised: int, now: float) -> int:
        """Admit `sequence` and return how many tokens it may compute in this step; 0 if it does not fit yet.

        promised: blocks that sequences in the middle of their prompts have still to take.
        """
        request, num_siblings = sequence.request, len(self._batch.siblings.get(sequence, ()))
        if self._slots.num_free <= num_siblings:
            self._stall(request, now, Lack.SLOTS, lambda: f"all {self._num_slots} are taken")
            return 0
        prefix = self._fitting_prefix(sequence, promised, num_siblings)
        if prefix is None:
            self._stall(request, now, Lack.BLOCKS, lambda: self._lack(sequence))
            return 0
        grant = self._batch.admit(sequence, prefix, self._limit(request), min(self._chunk, budget), now)
        if not sequence.preemptions:
            self._count(sequence, len(prefix) * self._pool.block_size)
            self.begun.append(request)
        self._stalled = None
        self._events.emit(Started(sequence, now))
        return grant

    def _stall(self, request: Request, now: float, lack: Lack, detail: Callable[[], str]) -> None:
        """Report why the first in the queue cannot start, unless that was reported last."""
        if self._stalled != (request.request_id, lack):
            self._stalled = (request.request_id, lack)
            self._events.emit(Stalled(request, now, lack, detail()))

    def _lack(self, sequence: Sequence) -> str:
        wanted, room = self._slots.blocks_for(sequence.num_tokens), self._pool.num_available
        return f"{wanted} for its tokens so far; {room} are free, some of them promised to those that run"

    def _fitting_prefix(self, sequence: Sequence, promised: int, num_siblings: int) -> list[int] | None:
        """Return the cached blocks to start with, or None if what is free does not hold the rest of `sequence`.

        While others run, one more block for each of them stays free, so that `sequence` is not preempted at once.
        """
        room = self._pool.num_available - promised
        if self._batch.running:
            room -= self._num_slots - self._slots.num_free + num_siblings
        if self._is_still_blocked(sequence, room):
            return None
        prefix = self._slots.find_prefix(sequence)
        wanted = self._slots.blocks_for(sequence.num_tokens) - len(prefix) + self._pool.count_idle(prefix)
        self._blocked = _Blocked(sequence, len(prefix), wanted) if room < wanted else None
        return prefix if self._blocked is None else None

    def _is_still_blocked(self, sequence: Sequence, room: int) -> bool:
        """Whether `sequence` did not fit before and `room` is still too little, with what others sealed since.

        Looks only at blocks behind those that were found, so that a long prompt costs no more than a short one.
        """
        blocked = self._blocked
        if blocked is None or blocked.sequence is not sequence:
            return False
        gained = self._slots.extend_prefix(sequence, blocked.found)
        if gained:
            blocked.found += len(gained)
            blocked.wanted -= len(gained) - self._pool.count_idle(gained)
        return room < blocked.wanted

    def _count(self, sequence: Sequence, hit: int) -> None:
        """Count a sequence that joined for the first time. hit: tokens that it found in the prefix cache."""
        if sequence.is_first:  # what the other choices find is this one's
            sequence.num_cached_tokens = min(hit, sequence.num_prompt_tokens)
        self.prompt_tokens += sequence.num_prompt_tokens
        if self._pool.enable_prefix_caching:
            self.prefix_queries += sequence.num_tokens
            self.prefix_hits += hit
