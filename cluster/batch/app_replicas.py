"""The replicas of a Serve app that runs already, for a batch beside its clients."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import uuid4

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.batch.errors import BatchError
from cluster.config import ClusterConfig, resolve_config
from cluster.router.directory import ReplicaDirectory
from cluster.router.dispatcher import Dispatcher
from engine.errors import ConfigError
from engine.loader.fingerprint import vocabulary_fingerprint

ASK_SECONDS = 30.0
ROUTER = "Router"


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
    vocabulary = vocabulary_fingerprint(model.config.model, model.config.tokenizer)
    scaled = model.config.max_replicas is not None
    directory = ReplicaDirectory(f"batch-{uuid4().hex}", handle, dispatcher, vocabulary, on_demand=scaled)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await directory.close()
