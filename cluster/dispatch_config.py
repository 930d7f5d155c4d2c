"""Times and bounds of a router's dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.routing.candidate import PolicyConfig
from cluster.routing.policies import policy_named
from engine.errors import ConfigError

_TIMES = (
    "stall_timeout",
    "progress_timeout",
    "admission_wait",
    "no_replica_timeout",
    "hand_over_after",
    "ping_interval",
    "resync_interval",
)


ADMISSION_WAIT = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class DispatcherConfig:
    """Times in seconds. Raises `ConfigError` naming the field.

    stall_timeout: silence of a replica after which its link is closed and its requests go elsewhere.
    progress_timeout: the same for a replica that speaks while its engine does not move; above the longest step.
    admission_wait: how long a new request waits for a replica before it is refused (503, `no_replica`), with the time
        that it stood in line; a second of it, or all if that is less, in any case.
    no_replica_timeout: how long a request that has run waits for a replica to go on (then 503, `replica_lost`).
    quarantine_deaths: replica deaths, one after the other and each before the request brought a token there, after
        which the request is taken for their cause (500, `request_quarantined`). With one such death missing it is a
        suspect: no two suspects run on one replica, and others avoid the replica until the suspect has brought a
        token. So bystanders, who make progress somewhere in between, are not blamed.
    hand_over_after: how long what runs on a draining replica may go on there; then it goes on elsewhere, if there is
        a replica of the same model.
    max_pending_tokens: tokens of a choice that may wait for a consumer that does not take them (`slow_consumer`).
    ping_interval: how often each replica is told that the router lives.
    max_hashed_tokens: leading prompt tokens that are looked for in the replicas' prefix caches.
    routing_policy: which replica runs a request, by name (`POLICIES`); policy: its weights.
    resync_interval: seconds between two requests to tell a prefix cache anew.
    """

    stall_timeout: float = 3.0
    progress_timeout: float = 60.0
    admission_wait: float = ADMISSION_WAIT
    no_replica_timeout: float = 30.0
    hand_over_after: float = 30.0
    quarantine_deaths: int = 3
    max_pending_tokens: int = 4096
    ping_interval: float = 1.0
    max_hashed_tokens: int = 131072
    routing_policy: str = "kv_aware"
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    resync_interval: float = 1.0

    def __post_init__(self) -> None:
        policy_named(self.routing_policy)
        for name in _TIMES:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {getattr(self, name)}", name)
        if self.quarantine_deaths < 2:
            raise ConfigError(
                f"quarantine_deaths must be at least 2, not {self.quarantine_deaths}", "quarantine_deaths"
            )
        for name in ("max_pending_tokens", "max_hashed_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", name)
