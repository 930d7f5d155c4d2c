"""What a configuration asks of the cluster: bundles of a replica, totals of the app. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import ClusterConfig

ROUTER_CPUS = 0.25


@dataclass(frozen=True)
class Placement:
    """Resources of one app.

    bundles: one per rank of a replica; the replica itself (rank 0, the driver worker) sits in bundle 0.
    """

    bundles: tuple[dict[str, float], ...]
    replicas: int
    routers: int

    @property
    def cpus(self) -> float:
        """CPUs of the whole app."""
        return self._total("CPU") + self.routers * ROUTER_CPUS

    @property
    def gpus(self) -> float:
        """GPUs of the whole app."""
        return self._total("GPU")

    def _total(self, kind: str) -> float:
        return self.replicas * sum(bundle.get(kind, 0.0) for bundle in self.bundles)


def plan_placement(config: ClusterConfig, use_gpu: bool) -> Placement:
    """Return one bundle per rank: CPUs, and one GPU where the model runs on GPUs."""
    bundle = {"CPU": config.cpus_per_worker}
    if use_gpu:
        bundle["GPU"] = 1.0
    bundles = tuple(dict(bundle) for _ in range(config.tensor_parallel_size))
    return Placement(bundles, config.replicas, config.routers)
