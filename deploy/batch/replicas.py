"""Where the rows of a batch run: on replicas of its own, or on those of an app that serves clients meanwhile."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from uuid import uuid4

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.app import uses_gpu
from cluster.batch.errors import BatchError
from cluster.batch.run.driver import Replicas
from cluster.batch.run.replica_pool import ReplicaPool
from cluster.config import ClusterConfig, resolve_config
from cluster.resources import AppResources, model_resources
from cluster.router.directory import ReplicaDirectory
from cluster.router.dispatcher import Dispatcher
from deploy.cli.dry_run import make_plan
from deploy.cli.processes import Interrupts, bounded
from deploy.serve.fork_server import fork_server
from deploy.serve.output import PhaseLog, quiet_serve
from deploy.serve.ray_cluster import JoinedRay, LocalRay, RayCluster, check_capacity
from engine.errors import ConfigError
from engine.loader.fingerprint import vocabulary_fingerprint

ASK_SECONDS = 30.0
ROUTER = "Router"
EXIT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class ServedApp:
    """A Serve app whose replicas run the rows. model: which of its models; None = its only one."""

    name: str
    model: str | None = None


class ReplicaProvider(ABC):
    """Gives rows replicas to run on. config: of the model there, its folder found on this machine."""

    config: ClusterConfig

    @abstractmethod
    def replicas(self) -> AbstractContextManager[Replicas]:
        """Return what links a dispatcher to the replicas, for as long as it is entered."""

    @abstractmethod
    def close(self) -> None:
        """Leave Ray as it was."""


class OwnReplicas(ReplicaProvider):
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

    @contextmanager
    def replicas(self) -> Iterator[Replicas]:
        """See `ReplicaProvider.replicas`."""
        with self._phases.phase("Ray") as notes:
            self._cluster = self._connected()
            notes.append(self._cluster.about)
        placement = model_resources(self.config, uses_gpu(self.config))
        check_capacity(AppResources((placement,), 0), ray.available_resources(), ray.cluster_resources())
        self._interrupts.ready()

        async def keep(dispatcher: Dispatcher) -> None:
            await ReplicaPool(self.config, list(placement.bundles), dispatcher).run()

        yield keep

    def close(self) -> None:
        """See `ReplicaProvider.close`."""
        if self._cluster is not None:
            with bounded(EXIT_SECONDS):
                self._cluster.stop()

    def _connected(self) -> RayCluster:
        if self._address is not None:
            return JoinedRay(self._address, self._verbose, self._interrupts)
        return LocalRay(self._cpus, self._verbose, self._interrupts, fork_server())


class AppReplicas(ReplicaProvider):
    """The replicas of a running app in the cluster at `address`."""

    def __init__(self, app: ServedApp, address: str | None, verbose: bool, interrupts: Interrupts) -> None:
        if address is None:
            raise ConfigError("app: set RAY_ADDRESS to the cluster that the app runs in, such as auto", "app")
        self._cluster = JoinedRay(address, verbose, interrupts)
        quiet_serve(verbose)
        try:
            self._model = find_model(app.name, app.model)
        except BaseException:
            self.close()
            raise
        self.config = self._model.config
        interrupts.ready()

    @contextmanager
    def replicas(self) -> Iterator[Replicas]:
        """See `ReplicaProvider.replicas`."""

        async def keep(dispatcher: Dispatcher) -> None:
            await use_app(self._model, dispatcher)

        yield keep

    def close(self) -> None:
        """See `ReplicaProvider.close`."""
        self._cluster.stop()


@dataclass(frozen=True, slots=True)
class AppModel:
    """One model of a running app, and the deployment of its replicas."""

    app: str
    deployment: str
    config: ClusterConfig


def find_model(app: str, name: str | None) -> AppModel:
    """Return the model that a running app calls `name`, or its only one.

    Raises `ConfigError` naming what there is where the app is not there, `BatchError` where the model is not.
    """
    _check_app(app)
    try:
        router: DeploymentHandle[object] = serve.get_deployment_handle(ROUTER, app_name=app)
        told = router.models.remote().result(timeout_s=ASK_SECONDS)
    except (RayServeException, RayError, TimeoutError) as error:
        raise BatchError(f"the app {app!r} does not answer: {error}") from error
    models = [AppModel(app, deployment, resolve_config(settings)) for deployment, settings in told]
    for model in models:
        if name in model.config.names or (name is None and len(models) == 1):
            return model
    names = ", ".join(model.config.model_id for model in models)
    raise BatchError(f"name one of the models of {app} with --model: {names}")


def _check_app(app: str) -> None:
    applications = serve.status().applications
    if app not in applications:
        running = ", ".join(applications) or "none"
        raise ConfigError(f"app: there is no app {app!r} in this cluster; running: {running}", "app")
    if ROUTER not in applications[app].deployments:
        raise ConfigError(f"app: {app!r} is no app of Squadron, which have a deployment {ROUTER}", "app")


async def use_app(model: AppModel, dispatcher: Dispatcher) -> None:
    """Keep `dispatcher` linked to the app's replicas, as one more of its routers, until cancelled."""
    handle: DeploymentHandle[object] = serve.get_deployment_handle(model.deployment, app_name=model.app)
    vocabulary = vocabulary_fingerprint(model.config.source, model.config.tokenizer)
    scaled = model.config.max_replicas is not None
    directory = ReplicaDirectory(f"batch-{uuid4().hex}", handle, dispatcher, vocabulary, on_demand=scaled)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await directory.close()
