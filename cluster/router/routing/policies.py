"""The routing policies by name. Each is a pure function of candidates, request and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Any

from cluster.router.routing.candidate import C, PolicyConfig, Query, random_two
from cluster.router.routing.kv_aware import kv_aware
from cluster.router.routing.session import session
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Policy:
    """pick: (candidates, at least one, in the order of their ids; query; random numbers; weights) -> one of them.

    reads_prefixes: whether it looks at what of the prompt is cached where; to find that out costs time.
    """

    pick: Callable[[Sequence[Any], Query, Random, PolicyConfig], Any]
    reads_prefixes: bool = False


def power_of_two(candidates: Sequence[C], query: Query, rng: Random, config: PolicyConfig) -> C:
    """Return the one of two random candidates that has fewer sequences."""
    return min(random_two(candidates, rng), key=lambda candidate: candidate.num_requests)


def round_robin(candidates: Sequence[C], query: Query, rng: Random, config: PolicyConfig) -> C:
    """Return one after the other."""
    return candidates[query.turn % len(candidates)]


def least_tokens(candidates: Sequence[C], query: Query, rng: Random, config: PolicyConfig) -> C:
    """Return the one with the fewest prompt tokens to compute, then the fewest sequences; equals take turns."""
    start = int(rng.random() * len(candidates))
    turned = [*candidates[start:], *candidates[:start]]
    return min(turned, key=lambda candidate: (candidate.outstanding_tokens, candidate.num_requests))


POLICIES: Mapping[str, Policy] = MappingProxyType(
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
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"routing_policy must be one of {', '.join(POLICIES)}, not {name!r}", "routing_policy")
    return policy
