"""Times and bounds of a router's dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.config_values import EXACT, MIGRATIONS
from cluster.routing_policies import PolicyConfig, policy_named
from engine.errors import ConfigError
from engine.loader.fingerprint import but_for_rounding

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

    stall_timeout: silence of a replica after which its link is closed and its requests go elsewhere; after half of it
        nothing more is sent there until it speaks. Where all are silent, who comes waits for them to be found again
        (`cluster.router.selection.SILENT_WAIT`).
    progress_timeout: the same for a replica that speaks while its engine does not move; above the longest step.
    admission_wait: how long a new request waits for a replica before it is refused (503, `no_replica`); one that has
        stood in line waits as long as it was promised there (`CallContext.patience`).
    no_replica_timeout: how long a request that has run waits for a replica to go on (then 503, `replica_lost`).
    quarantine_deaths: replica deaths, one after the other, each while the request was computed there and had brought
        no token, after which it is taken for their cause (500, `request_quarantined`). With one such death missing it
        is a suspect: few of those run on one replica, one unless they are many, and others avoid the replica until
        the suspect has brought a token. So bystanders, who make progress somewhere in between, are not blamed; nor is
        anybody for a link that is cut, or a replica that falls silent and lives (`cluster.router.quarantine`).
    hand_over_after: how long what runs on a draining replica may go on there; then it goes on elsewhere, if there is
        a replica of the same model.
    max_pending_tokens: tokens of a choice that may wait for a consumer that does not take them (`slow_consumer`);
        with log-probabilities fewer, an eighth at least.
    ping_interval: how often each replica gets a ping, which shows that the router lives.
    max_hashed_tokens: leading prompt tokens that are looked for in the replicas' prefix caches.
    routing_policy: which replica runs a request, by name (`ROUTING_POLICIES`); policy: its weights.
    resync_interval: seconds between two requests for all keys of a prefix cache.
    stream_migration: where a stream goes on whose replica is lost (`MIGRATIONS`).
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
    stream_migration: str = EXACT

    def __post_init__(self) -> None:
        policy_named(self.routing_policy)
        for name in _TIMES:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {getattr(self, name)}", name)
        if self.quarantine_deaths < 2:
            raise ConfigError(
                f"quarantine_deaths must be at least 2, not {self.quarantine_deaths}", "quarantine_deaths"
            )
        if self.stream_migration not in MIGRATIONS:
            known = " or ".join(MIGRATIONS)
            raise ConfigError(f"stream_migration must be {known}, not {self.stream_migration!r}", "stream_migration")
        for name in ("max_pending_tokens", "max_hashed_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", name)

    def identity(self, fingerprint: str) -> str:
        """Return what a stream's replicas must have in common. fingerprint: of a replica."""
        return fingerprint if self.stream_migration == EXACT else but_for_rounding(fingerprint)
