"""Workloads of prompts that begin alike, and what the best possible cache would find of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from engine.request import Request
from engine.sampling_params import SamplingParams

FIRST_TOKEN, LAST_TOKEN = 3, 31_999


@dataclass(frozen=True, slots=True)
class Workload:
    """groups: prompts begin in so many ways; 0 = no two alike. skew: exponent of Zipf's law of how often each comes,
    0 = all as often. Lengths in tokens: of what a group shares, of each prompt's own end, of the output."""

    name: str
    groups: int
    skew: float
    requests: int
    prefix: int = 2048
    suffix: int = 64
    output: int = 64
    seed: int = 0

    def prompts(self) -> list[tuple[int, ...]]:
        """Return the prompts in order of arrival."""
        pick = Random(self.seed)
        heads = [self._tokens(pick, self.prefix) for _ in range(self.groups)]
        weights = [1 / (rank + 1) ** self.skew for rank in range(self.groups)]
        chosen = pick.choices(heads, weights, k=self.requests) if heads else None
        return [
            (chosen[i] if chosen else self._tokens(pick, self.prefix)) + self._tokens(pick, self.suffix)
            for i in range(self.requests)
        ]

    def request(self, number: int, prompt: tuple[int, ...]) -> Request:
        """Return one request."""
        params = SamplingParams(max_tokens=self.output, ignore_eos=True, temperature=1.0)
        return Request(f"r{number}", prompt, params, seed=number)

    @staticmethod
    def _tokens(pick: Random, count: int) -> tuple[int, ...]:
        return tuple(pick.choices(range(FIRST_TOKEN, LAST_TOKEN), k=count))


def oracle_hit_tokens(prompts: Sequence[tuple[int, ...]], num_blocks: int, block_size: int) -> int:
    """Return the prompt tokens that one cache of `num_blocks` finds that knows the future.

    Prompts come one after the other, each block is there as soon as it came, and the one whose next use is farthest
    away is given up first (Belady 1966). No routing over caches of the same size together finds more, but for what
    held blocks would take: those are free here.
    """
    keys = [_block_names(prompt, block_size) for prompt in prompts]
    coming: dict[tuple[int, int], list[int]] = {}
    for time in range(len(keys) - 1, -1, -1):
        for key in keys[time]:
            coming.setdefault(key, []).append(time)
    cached: dict[tuple[int, int], int] = {}  # block -> its next use
    farthest: list[tuple[int, tuple[int, int]]] = []
    hits = 0
    for time, names in enumerate(keys):
        reusable = (len(prompts[time]) - 1) // block_size
        depth = next((i for i, key in enumerate(names[:reusable]) if key not in cached), reusable)
        hits += depth * block_size
        for key in names:
            coming[key].pop()
            following = coming[key][-1] if coming[key] else len(keys) + time
            cached[key] = following
            heapq.heappush(farthest, (-following, key))
        while len(cached) > num_blocks:
            negative, key = heapq.heappop(farthest)
            if cached.get(key) == -negative:
                del cached[key]
    return hits


def _block_names(prompt: tuple[int, ...], block_size: int) -> list[tuple[int, int]]:
    """Return a name for each full block, equal for equal beginnings."""
    names, chain = [], 0
    for start in range(0, len(prompt) - block_size + 1, block_size):
        chain = hash((chain, prompt[start : start + block_size]))
        names.append((start, chain))
    return names
