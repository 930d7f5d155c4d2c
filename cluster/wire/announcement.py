"""What a replica tells a router that leases it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.wire.link import LinkAddress


@dataclass(frozen=True, slots=True)
class Announcement:
    """One replica: where its report stream listens, and what came up.

    phases: seconds that each phase of its start took. kv_tokens: tokens that its KV cache holds.
    engine: what serves, in a line (`engine.worker.executor_start.ModelInfo.words`).
    pids: process ids by rank, on their own nodes. vocabulary: `vocabulary_fingerprint` of its tokenizer; only
    a router of the same may send requests, since tokens mean something else elsewhere.
    """

    replica_id: str
    address: LinkAddress
    phases: dict[str, float]
    kv_tokens: int
    pids: tuple[int, ...]
    vocabulary: str = ""
    engine: str = ""

    def public(self) -> dict[str, Any]:
        """Return what may be shown to anyone who asks whether the service is ready."""
        return {
            "id": self.replica_id,
            "phases": {name: round(seconds, 3) for name, seconds in self.phases.items()},
            "kv_tokens": self.kv_tokens,
            "engine": self.engine,
            "pids": list(self.pids),
        }
