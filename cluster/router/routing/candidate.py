"""What a routing policy is given: the replicas it may choose among, and what is known of the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeVar

from engine.errors import ConfigError


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
class Query:
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


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of a prompt is cached where. depths: replica id -> leading blocks that it has, if any.

    cold_key: name of the first block that none has; None if there is none, or nobody looked.
    heir: the replica that is about to have that block, or had it last, if any.
    """

    depths: Mapping[str, int] = field(default_factory=dict)
    cold_key: int | None = None
    heir: str | None = None


def random_two(candidates: Sequence[C], rng: Random) -> tuple[C, C]:
    """Return two different candidates; one twice where there is but one."""
    count = len(candidates)
    first = int(rng.random() * count)
    return candidates[first], candidates[(first + 1 + int(rng.random() * (count - 1))) % count]
