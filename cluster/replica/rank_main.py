"""What a worker rank's process runs under Ray: the engine's worker loop, and beside it the rank's figures."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.telemetry.families import Source
from cluster.telemetry.publishing import Publishing
from cluster.telemetry.ranks import RankFigures
from cluster.telemetry.ray_publisher import RayPublisher, publish_period
from engine.config import EngineConfig
from engine.worker.worker import worker_main
from parallel.rendezvous import RendezvousAddress


@dataclass(frozen=True, slots=True)
class RankOf:
    """Whose rank it is. vllm: whether figures go by vLLM's names as well."""

    model_name: str
    replica: str
    vllm: bool = False


def rank_main(
    of: RankOf,
    config: EngineConfig,
    rank: int,
    size: int,
    rendezvous_address: RendezvousAddress,
    channel_handle: str | None,
) -> None:
    """Be a rank as `engine.worker.worker.worker_main` says, and publish its figures through Ray."""
    figures = RankFigures(of.model_name)
    own = {"replica": of.replica, "rank": str(rank)}
    publishing = Publishing(figures.collect, RayPublisher((Source.RANK,), own, of.vllm), publish_period())
    publishing.start()
    try:
        worker_main(config, rank, size, rendezvous_address, channel_handle, figures.note)
    finally:
        publishing.stop()
