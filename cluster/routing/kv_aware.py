"""The default policy: prefill work that a cached prefix saves, weighed against the load where it is cached.

Cost is counted in prompt tokens: what waits to be computed there, what decoding beside others costs, and what of
this prompt is not in the cache there. Those that have some of the prompt compete with two that the first unknown
block names (the same two for all requests that begin alike, in every router, so that a new prefix is computed in one
or two places) and with a random one. Leaving a prefix's home must pay by more than the work of computing it again,
because a second copy costs room for others: a hot prefix spreads, but only as far as its load does.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from cluster.routing.candidate import C, Candidate, PolicyConfig, Query, random_two


def kv_aware(candidates: Sequence[C], query: Query, rng: Random, config: PolicyConfig) -> C:
    """Return the cheapest of those with a cached prefix, the two that a new prefix belongs to, and a random one.

    candidates: at least one, in the same order in all routers.
    """
    overlaps = query.overlaps
    cold = max(0, query.prompt_tokens - max(overlaps.values(), default=0))
    contenders = [(one, 0.0) for one in candidates if one.replica_id in overlaps] if overlaps else []
    stranger, other = random_two(candidates, rng)
    if query.cold_key is None:
        contenders += [(stranger, 0.0), (other, 0.0)]
    else:
        # Whoever begins alike is sent here too: it will find this prompt's blocks.
        bonus = config.hysteresis * cold
        contenders += [(candidate, bonus) for candidate in named_pair(candidates, query.cold_key)]
        contenders.append((stranger, 0.0))
    best, least = stranger, float("inf")
    for candidate, bonus in contenders:
        price = cost(candidate, query.prompt_tokens, overlaps.get(candidate.replica_id, 0), config) - bonus
        if price < least:
            best, least = candidate, price
    return best


def cost(candidate: Candidate, prompt_tokens: int, overlap_tokens: int, config: PolicyConfig) -> float:
    """Return what running a prompt there costs, in prompt tokens; a cached prefix counts for more than its length."""
    credit = (1.0 + config.hysteresis) * min(overlap_tokens, prompt_tokens)
    load = candidate.outstanding_tokens + config.request_cost * candidate.num_requests
    usage = candidate.kv_usage
    if usage > config.kv_pressure:
        load += config.full_cache_cost * (usage - config.kv_pressure) / (1.0 - config.kv_pressure)
    return load + prompt_tokens - credit


def named_pair(candidates: Sequence[C], key: int) -> tuple[C, C]:
    """Return the two candidates that `key`, 64 well mixed bits, stands for; one twice where there is but one."""
    count = len(candidates)
    first = key % count
    second = (first + 1 + (key >> 32) % (count - 1)) % count if count > 1 else first
    return candidates[first], candidates[second]
