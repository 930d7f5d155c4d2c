"""What a configuration asks of the cluster: bundles of a replica, totals of the app. Pure arithmetic.

Also the names of Serve's deployments of each model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256

from cluster.app_config import AppConfig
from cluster.config import ClusterConfig

ROUTER_CPUS = 0.25
GATEWAY_CPUS = 0.25
BATCHES_CPUS = 0.25


@dataclass(frozen=True)
class ModelResources:
    """Resources of one model.

    bundles: one per rank of a replica; the replica itself (rank 0, the driver worker) sits in bundle 0.
    """

    bundles: tuple[dict[str, float], ...]
    replicas: int

    def total(self, kind: str) -> float:
        """Resources of a kind ("CPU", "GPU") of all its replicas."""
        return self.replicas * sum(bundle.get(kind, 0.0) for bundle in self.bundles)


@dataclass(frozen=True)
class AppResources:
    """Resources of one app. batches: whether it runs batches. gateways: copies that hold clients' connections."""

    models: tuple[ModelResources, ...]
    routers: int
    batches: bool = False
    gateways: int = 0

    @property
    def cpus(self) -> float:
        """CPUs of the whole app."""
        beside = self.routers * ROUTER_CPUS + self.gateways * GATEWAY_CPUS + self.batches * BATCHES_CPUS
        return sum(model.total("CPU") for model in self.models) + beside

    @property
    def one_more(self) -> dict[str, float]:
        """Resources of one more replica of each model, router and gateway, which an update starts."""
        kinds = {kind for model in self.models for bundle in model.bundles for kind in bundle}
        more = {kind: sum(replace(model, replicas=1).total(kind) for model in self.models) for kind in kinds}
        return more | {"CPU": more.get("CPU", 0.0) + ROUTER_CPUS + (GATEWAY_CPUS if self.gateways else 0.0)}

    @property
    def gpus(self) -> float:
        """GPUs of the whole app."""
        return sum(model.total("GPU") for model in self.models)


def model_resources(config: ClusterConfig, use_gpu: bool) -> ModelResources:
    """Return one bundle per rank: CPUs, and one GPU where the model runs on GPUs."""
    bundle = {"CPU": config.cpus_per_worker}
    if use_gpu:
        bundle["GPU"] = 1.0
    bundles = tuple(dict(bundle) for _ in range(config.tensor_parallel_size))
    return ModelResources(bundles, config.most_replicas)


def app_resources(app: AppConfig, use_gpu: Callable[[ClusterConfig], bool]) -> AppResources:
    """Return what all models need together. use_gpu: whether a model runs on GPUs."""
    return AppResources(
        tuple([model_resources(one, use_gpu(one)) for one in app.models]),
        app.shared.routers,
        app.shared.batch_dir is not None,
        app.shared.gateways,
    )


ONE = "Replica"


def deployment_names(app: AppConfig) -> list[str]:
    """Return a name for each model's deployment, the same whatever other models there are.

    An app with one model that is not listed calls it always alike: another model takes its place step by step.
    """
    if not app.listed:
        return [ONE]
    return [f"{ONE}-{_safe(name)}" for name in app.names]


def _safe(name: str) -> str:
    """Keep letters, digits, dots, dashes and underscores; a name that this changes gets digits of its own."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    return plain if plain == name else f"{plain}-{sha256(name.encode()).hexdigest()[:8]}"
