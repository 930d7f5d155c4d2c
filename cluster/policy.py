"""Which replica runs a request: a pure function of what is known of the replicas, and an index of their caches.

Cost is counted in prompt tokens: what waits to be computed there, what decoding beside others costs, and what of this
prompt is not in the cache there. Two replicas drawn at random compete with the one whose cache fits best; the
cheapest wins. The credit for cached tokens is bounded, so a hot prefix spreads as soon as its home is loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as the router sees it.

    outstanding_tokens: prompt tokens that wait to be computed there. num_requests: sequences that run or wait there.
    kv_usage: share of the KV blocks that are held, 0 to 1. overlap_tokens: leading prompt tokens in its prefix cache.
    """

    replica_id: str
    outstanding_tokens: int = 0
    num_requests: int = 0
    kv_usage: float = 0.0
    overlap_tokens: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Weights of the cost, in prompt tokens.

    request_cost: what one more sequence beside ours costs. max_affinity: most that a cached prefix counts for.
    full_cache_cost: what a full KV cache costs; it rises from `kv_pressure` on. Raises `ConfigError`.
    """

    request_cost: float = 32.0
    max_affinity: int = 4096
    full_cache_cost: float = 8192.0
    kv_pressure: float = 0.8

    def __post_init__(self) -> None:
        if not 0.0 <= self.kv_pressure < 1.0:
            raise ConfigError(f"kv_pressure must be at least 0 and below 1, not {self.kv_pressure}", "kv_pressure")


def cost(candidate: Candidate, prompt_tokens: int, config: PolicyConfig) -> float:
    """Return what running a prompt of `prompt_tokens` there costs, in prompt tokens."""
    credit = min(candidate.overlap_tokens, config.max_affinity, prompt_tokens)
    pressure = max(0.0, candidate.kv_usage - config.kv_pressure) / (1.0 - config.kv_pressure)
    load = candidate.outstanding_tokens + config.request_cost * candidate.num_requests
    return load + prompt_tokens - credit + config.full_cache_cost * pressure


def rank(
    candidates: Sequence[Candidate], prompt_tokens: int, rng: Random, config: PolicyConfig | None = None
) -> list[str]:
    """Return the ids of all candidates that take requests, the one to try first in front.

    The order of equals is drawn from `rng`, so routers that see the same figures do not all run to one replica.
    """
    config = config or PolicyConfig()
    eligible = [candidate for candidate in candidates if not candidate.draining]
    rng.shuffle(eligible)
    costs = {candidate.replica_id: cost(candidate, prompt_tokens, config) for candidate in eligible}
    cached = [candidate for candidate in eligible if candidate.overlap_tokens]
    home = max(cached, key=lambda c: (c.overlap_tokens, -costs[c.replica_id]), default=None)
    contenders = eligible[:2] + ([home] if home else [])
    winner = min(contenders, key=lambda candidate: costs[candidate.replica_id], default=None)
    rest = sorted((c for c in eligible if c is not winner), key=lambda candidate: costs[candidate.replica_id])
    return [candidate.replica_id for candidate in ([winner] if winner else []) + rest]


class PrefixIndex:
    """Which replica has which KV block in its prefix cache, as far as was heard. Wrong entries only cost time.

    Bounded to `max_blocks` keys; those heard of longest ago are forgotten first. A replica's entries hang on a number
    that it gets with its first update and loses when it is dropped: what an earlier life stored is not looked at.
    """

    def __init__(self, max_blocks: int = 1_000_000) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[int, set[int]] = OrderedDict()  # block key -> numbers of its holders
        self._numbers: dict[str, int] = {}
        self._next_sequence: dict[str, int] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._holders)

    def update(
        self, replica_id: str, sequence: int, stored: Iterable[int], removed: Iterable[int], cleared: bool = False
    ) -> None:
        """Take in one update of a replica; after a gap in `sequence` only what comes from now on is believed.

        A repeated update is passed over. A key both removed and stored counts as stored.
        """
        expected = self._next_sequence.get(replica_id, 0)
        if sequence < expected:
            return
        if sequence > expected or cleared:
            self._renumber(replica_id)
        self._next_sequence[replica_id] = sequence + 1
        number = self._numbers.get(replica_id) or self._renumber(replica_id)
        for key in removed:
            self._discard(key, number)
        for key in stored:
            self._holders.setdefault(key, set()).add(number)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def drop(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        self._numbers.pop(replica_id, None)
        self._next_sequence.pop(replica_id, None)

    def overlaps(self, keys: Sequence[int]) -> dict[str, int]:
        """Return replica id -> number of leading blocks of `keys` that it has, for those that have any."""
        alive = {number: replica_id for replica_id, number in self._numbers.items()}
        depths: dict[str, int] = {}
        for depth, key in enumerate(keys, start=1):
            holders = self._holders.get(key, ())
            alive = {number: alive[number] for number in holders if number in alive}
            if not alive:
                break
            depths.update(dict.fromkeys(alive.values(), depth))
        return depths

    def _renumber(self, replica_id: str) -> int:
        self._last_number += 1
        self._numbers[replica_id] = self._last_number
        return self._last_number

    def _discard(self, key: int, number: int) -> None:
        holders = self._holders.get(key)
        if holders is not None:
            holders.discard(number)
            if not holders:
                del self._holders[key]
