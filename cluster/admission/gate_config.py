"""Bounds of the queue in front of the replicas."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FairGateConfig:
    """Bounds of the queue. Raises `ConfigError`.

    max_waiting: requests of one tenant that may wait. max_wait: seconds that one may. target_ttft: seconds to the
    first token that are aimed at: as long as that may the wait be at most, None = `max_wait`. absent_wait: seconds
    that one may wait for a replica that comes while there is none; None = as at any time.
    """

    max_waiting: int = 4096
    max_wait: float = 60.0
    target_ttft: float | None = None
    absent_wait: float | None = None

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting must be at least 1, not {self.max_waiting}", "max_waiting")
        for name in ("max_wait", "target_ttft", "absent_wait"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {value}", name)

    @property
    def longest_wait(self) -> float:
        """Seconds after which nobody waits any more while there is a replica."""
        return self.max_wait if self.target_ttft is None else min(self.max_wait, self.target_ttft)
