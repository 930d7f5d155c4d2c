"""Where the rows of a batch run: on replicas of its own, or on those of an app that serves already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict

import ray

from cluster.app import uses_gpu
from cluster.batch.app_replicas import find_model, use_app
from cluster.batch.crew import Crew
from cluster.batch.driver import Replicas
from cluster.config import ClusterConfig, resolve_config
from cluster.placement import AppPlacement, plan_placement
from cluster.router.dispatcher import Dispatcher
from deploy.batch.options import ServedApp
from deploy.cli.dry_run import make_plan
from deploy.cli.interrupts import Interrupts, bounded
from deploy.cli.phases import PhaseLog
from deploy.serve.joined_ray import JoinedRay
from deploy.serve.local_ray import LocalRay, RayCluster, check_capacity
from deploy.serve.ray_output import quiet_serve
from engine.errors import ConfigError

EXIT_SECONDS = 20.0


class Place(ABC):
    """Gives rows replicas to run on. config: of the model there, its folder found on this machine."""

    config: ClusterConfig

    @abstractmethod
    def connect(self) -> None:
        """Connect to Ray, if that is not done yet."""

    @abstractmethod
    def replicas(self) -> AbstractContextManager[Replicas]:
        """Return what links a dispatcher to the replicas, for as long as it is entered."""

    @abstractmethod
    def close(self) -> None:
        """Leave Ray as it was."""


class OwnReplicas(Place):
    """Replicas that are started for the batch, on a Ray of its own or in the cluster at `address`."""

    def __init__(
        self, config: ClusterConfig, address: str | None, verbose: bool, interrupts: Interrupts, phases: PhaseLog
    ) -> None:
        self.config = resolve_config(asdict(config))
        self._cpus = make_plan(self.config).placement.total("CPU")
        self._address = address
        self._verbose = verbose
        self._interrupts = interrupts
        self._phases = phases
        self._cluster: RayCluster | None = None

    def connect(self) -> None:
        """Start Ray here, or join the cluster."""
        if self._cluster is not None:
            return
        with self._phases.phase("Ray") as notes:
            self._cluster = self._connected()
            notes.append(self._cluster.about)
        self._interrupts.listen()

    @contextmanager
    def replicas(self) -> Iterator[Replicas]:
        """See `Place.replicas`."""
        self.connect()
        placement = plan_placement(self.config, uses_gpu(self.config))
        check_capacity(AppPlacement((placement,), 0), ray.available_resources(), ray.cluster_resources())

        async def keep(dispatcher: Dispatcher) -> None:
            await Crew(self.config, list(placement.bundles), dispatcher).run()

        yield keep

    def close(self) -> None:
        """See `Place.close`."""
        if self._cluster is not None:
            with bounded(EXIT_SECONDS):
                self._cluster.stop()

    def _connected(self) -> RayCluster:
        if self._address is not None:
            return JoinedRay(self._address, self._verbose)
        return LocalRay(self._cpus, self._verbose)


class AppReplicas(Place):
    """The replicas of a running app in the cluster at `address`."""

    def __init__(self, app: ServedApp, address: str | None, verbose: bool, interrupts: Interrupts) -> None:
        if address is None:
            raise ConfigError("app: set RAY_ADDRESS to the cluster that the app runs in, such as auto", "app")
        self._cluster = JoinedRay(address, verbose)
        interrupts.listen()
        quiet_serve(verbose)
        try:
            self._model = find_model(app.name, app.model)
        except BaseException:
            self.close()
            raise
        self.config = self._model.config

    def connect(self) -> None:
        """It is done: the app told its settings."""

    @contextmanager
    def replicas(self) -> Iterator[Replicas]:
        """See `Place.replicas`."""

        async def keep(dispatcher: Dispatcher) -> None:
            await use_app(self._model, dispatcher)

        yield keep

    def close(self) -> None:
        """See `Place.close`."""
        self._cluster.stop()
