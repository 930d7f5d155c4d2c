"""What a replica is, and the times it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.wire.messages import Welcome


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica is and runs, as in `Welcome`. `num_kv_blocks` excludes the null block.

    token_budget: tokens that a step of its engine may compute.
    """

    replica_id: str
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    token_budget: int = 8192

    def welcome(self, incarnation: int, draining: bool) -> Welcome:
        """Return the first message to a router."""
        return Welcome(
            self.replica_id,
            incarnation,
            self.model,
            self.max_model_len,
            self.vocab_size,
            self.block_size,
            self.num_kv_blocks,
            self.eos_token_ids,
            draining,
            self.fingerprint,
        )


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """Times in seconds.

    heartbeat: how often a router is told that all is well, and what runs here for it. router_timeout: silence of a
    router after which it is taken for dead and its requests are ended. costs: between two looks of a router at the
    accounts.
    """

    heartbeat: float = 0.5
    router_timeout: float = 10.0
    costs: float = 1.0
