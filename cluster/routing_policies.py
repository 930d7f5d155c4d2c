"""The routing policies by name. Each is a pure function of candidates, request and random numbers.

Reading a configuration checks the name, so this module imports nothing else of the cluster.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from random import Random
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from engine.errors import ConfigError

MAX_HOLDERS = 16  # of those with a cached prefix that are compared: more cost time and bring little
POINTS = 64  # places of one replica on the ring: loads differ by some 12 % with so many


class Candidate(Protocol):
    """A replica that takes requests, as the router sees it. Read only."""

    @property
    def replica_id(self) -> str:
        """Its name, unique among the candidates."""

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens that wait to be computed there."""

    @property
    def num_requests(self) -> int:
        """Sequences that run or wait there."""

    @property
    def kv_usage(self) -> float:
        """Share of its KV blocks that are held, 0 to 1."""


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """What a policy may know of a request.

    overlaps: replica id -> leading prompt tokens in its prefix cache, for those that have any.
    cold_key: name of the prompt's first block that no replica has: equal prompts have equal ones. None = no such.
    heir: the replica that is about to have that block, or had it last.
    session: what requests of one conversation share; empty = no conversation is known.
    turn: number of choices made before this one.
    """

    prompt_tokens: int
    overlaps: Mapping[str, int] = field(default_factory=dict)
    cold_key: int | None = None
    heir: str | None = None
    session: bytes = b""
    turn: int = 0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Weights of a policy's cost, in prompt tokens. Raises `ConfigError`.

    request_cost: what one more sequence beside ours costs.
    hysteresis: what a prefix's home is preferred by beyond the work that it saves, as a share of that.
    imbalance: by how much more load than elsewhere a prefix's home may have, as a share, before it is left.
    full_cache_cost: what a token that is not cached costs more where the KV cache is full; it rises from the usage
        `kv_pressure` on.
    session_load: sequences that a replica may have, as a multiple of the mean, before sessions are sent past it.
    """

    request_cost: float = 128.0
    hysteresis: float = 2.0
    imbalance: float = 4.0
    full_cache_cost: float = 1.0
    kv_pressure: float = 0.8
    session_load: float = 1.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.kv_pressure < 1.0:
            raise ConfigError(f"kv_pressure must be at least 0 and below 1, not {self.kv_pressure}", "kv_pressure")
        if self.session_load <= 1.0:
            raise ConfigError(f"session_load must be above 1, not {self.session_load}", "session_load")
        for name in ("request_cost", "hysteresis", "imbalance", "full_cache_cost"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}", name)


def random_two(candidates: Sequence[C], rng: Random) -> tuple[C, C]:
    """Return two different candidates; one twice where there is but one."""
    count = len(candidates)
    first = int(rng.random() * count)
    return candidates[first], candidates[(first + 1 + int(rng.random() * (count - 1))) % count]


def kv_aware(candidates: Sequence[C], query: RoutingQuery, rng: Random, config: PolicyConfig) -> C:
    """Return the cheapest of those with a cached prefix, whoever a new prefix belongs to, and a random one.

    It weighs the prefill work that a cached prefix saves against the load where it is cached.
    Cost is counted in prompt tokens: what waits to be computed there, what decoding beside others costs, and what of
    this prompt is not in the cache there. Those that have some of the prompt compete with a random one, and with the
    heir of the rest: whoever was sent such a prompt before or had its blocks last, or, where none is known, one of
    two that the first block's name stands for, in every router the same. So prompts that begin alike come together
    before any replica has their blocks, and after they were given up.

    Leaving the home of a prefix makes work for everybody behind it in the queues, and takes room in another cache. So
    it must pay by more than the work of computing the prefix again, and by more the longer the queues are: loads
    elsewhere count for more than they are, in proportion to what of the prompt is not at home there. A hot prefix
    spreads, but only as far as its load does.

    candidates: at least one, in the same order in all routers.
    """
    overlaps, prompt = query.overlaps, query.prompt_tokens
    holders = [one for one in candidates if one.replica_id in overlaps] if overlaps else []
    longest = max(overlaps.values()) if holders else 0
    if len(holders) > MAX_HOLDERS:
        best_ones = [one for one in holders if overlaps[one.replica_id] == longest]
        start = int(rng.random() * len(best_ones))
        holders = (best_ones + best_ones[:MAX_HOLDERS])[start : start + MAX_HOLDERS]
    cold = prompt - longest
    heirs = _heirs(candidates, query)
    best, least = candidates[0], float("inf")
    for candidate in (*heirs, *holders, *random_two(candidates, rng)[: 1 if heirs else 2]):
        cached = overlaps.get(candidate.replica_id, 0)
        price = cost(candidate, prompt, cached, cold if candidate in heirs else 0, config)
        if price < least:
            best, least = candidate, price
    return best


def cost(candidate: Candidate, prompt_tokens: int, cached: int, promised: int, config: PolicyConfig) -> float:
    """Return what running a prompt there costs, in prompt tokens.

    cached: its leading tokens in the prefix cache there. promised: those that other prompts which begin alike will
    find there, since they are sent there too.
    """
    uncached = prompt_tokens - min(cached, prompt_tokens)
    load = candidate.outstanding_tokens + config.request_cost * candidate.num_requests
    at_home = min(prompt_tokens, cached + promised)
    price = load * (1.0 + config.imbalance * (1.0 - at_home / prompt_tokens)) + uncached - config.hysteresis * at_home
    usage = candidate.kv_usage
    if usage > config.kv_pressure:
        price += config.full_cache_cost * (usage - config.kv_pressure) / (1.0 - config.kv_pressure) * uncached
    return price


def named_pair(candidates: Sequence[C], key: int) -> tuple[C, C]:
    """Return the two candidates that `key`, 64 well mixed bits, stands for; one twice where there is but one."""
    count = len(candidates)
    first = key % count
    second = (first + 1 + (key >> 32) % (count - 1)) % count if count > 1 else first
    return candidates[first], candidates[second]


def _heirs(candidates: Sequence[C], query: RoutingQuery) -> Sequence[C]:
    """Return the candidate that gets a prefix which none has now."""
    if query.cold_key is None:
        return ()
    known = [one for one in candidates if one.replica_id == query.heir] if query.heir is not None else []
    return known or named_pair(candidates, query.cold_key)


def session(candidates: Sequence[C], query: RoutingQuery, rng: Random, config: PolicyConfig) -> C:
    """Return the first on the ring from the session's point on whose load is not far above the mean.

    It keeps a conversation on one replica. Without a session id: what `kv_aware` says.
    Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2017).
    """
    if not query.session:
        return kv_aware(candidates, query, rng, config)
    total = sum([candidate.num_requests for candidate in candidates])
    bound = math.ceil(config.session_load * (total + 1) / len(candidates))
    points, owners = ring(tuple([candidate.replica_id for candidate in candidates]))
    start = bisect_left(points, point(query.session))
    for step in range(len(owners)):
        candidate = candidates[owners[(start + step) % len(owners)]]
        if candidate.num_requests < bound:
            break
    return candidate


@lru_cache(maxsize=16)
def ring(replica_ids: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Return the ring's points in order, and for each the number of the replica that owns it."""
    pairs = [
        (point(f"{replica_id}#{i}".encode()), n) for n, replica_id in enumerate(replica_ids) for i in range(POINTS)
    ]
    pairs.sort()
    return [place for place, _ in pairs], [owner for _, owner in pairs]


def point(name: bytes) -> int:
    """Return the place of a name on the ring."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Policy:
    """pick: (candidates, at least one, in the order of their ids; query; random numbers; weights) -> one of them.

    reads_prefixes: whether it looks at what of the prompt is cached where; to find that out costs time.
    """

    pick: Callable[[Sequence[Any], RoutingQuery, Random, PolicyConfig], Any]
    reads_prefixes: bool = False


def power_of_two(candidates: Sequence[C], query: RoutingQuery, rng: Random, config: PolicyConfig) -> C:
    """Return the one of two random candidates that has fewer sequences."""
    return min(random_two(candidates, rng), key=lambda candidate: candidate.num_requests)


def round_robin(candidates: Sequence[C], query: RoutingQuery, rng: Random, config: PolicyConfig) -> C:
    """Return one after the other."""
    return candidates[query.turn % len(candidates)]


def least_tokens(candidates: Sequence[C], query: RoutingQuery, rng: Random, config: PolicyConfig) -> C:
    """Return the one with the fewest prompt tokens to compute, then the fewest sequences; equals take turns."""
    start = int(rng.random() * len(candidates))
    turned = [*candidates[start:], *candidates[:start]]
    return min(turned, key=lambda candidate: (candidate.outstanding_tokens, candidate.num_requests))


ROUTING_POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "kv_aware": Policy(kv_aware, reads_prefixes=True),
        "power_of_two": Policy(power_of_two),
        "round_robin": Policy(round_robin),
        "session": Policy(session, reads_prefixes=True),
        "least_tokens": Policy(least_tokens),
    }
)


def policy_named(name: str) -> Policy:
    """Return a policy; raises `ConfigError` that names those there are."""
    if name not in ROUTING_POLICIES:
        known = ", ".join(ROUTING_POLICIES)
        raise ConfigError(f"routing_policy must be one of {known}, not {name!r}", "routing_policy")
    return ROUTING_POLICIES[name]
