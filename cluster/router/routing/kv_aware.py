"""The default policy: prefill work that a cached prefix saves, weighed against the load where it is cached.

Cost is counted in prompt tokens: what waits to be computed there, what decoding beside others costs, and what of
this prompt is not in the cache there. Those that have some of the prompt compete with a random one, and with the heir
of the rest: whoever was sent such a prompt before or had its blocks last, or, where none is known, one of two that
the first block's name stands for, in every router the same. So prompts that begin alike come together before any
replica has their blocks, and after they were given up.

Leaving the home of a prefix makes work for everybody behind it in the queues, and takes room in another cache. So it
must pay by more than the work of computing the prefix again, and by more the longer the queues are: loads elsewhere
count for more than they are, in proportion to what of the prompt is not at home there. A hot prefix spreads, but only
as far as its load does.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from cluster.router.routing.candidate import C, Candidate, PolicyConfig, Query, random_two

MAX_HOLDERS = 16  # of those with a cached prefix that are compared: more cost time and bring little


def kv_aware(candidates: Sequence[C], query: Query, rng: Random, config: PolicyConfig) -> C:
    """Return the cheapest of those with a cached prefix, whoever a new prefix belongs to, and a random one.

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


def _heirs(candidates: Sequence[C], query: Query) -> Sequence[C]:
    """Return who is to have what nobody has now."""
    if query.cold_key is None:
        return ()
    known = [one for one in candidates if one.replica_id == query.heir] if query.heir is not None else []
    return known or named_pair(candidates, query.cold_key)
