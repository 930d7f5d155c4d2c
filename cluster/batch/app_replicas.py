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
from cluster.directory import ReplicaDirectory
from cluster.dispatcher import Dispatcher
from engine.fingerprint import vocabulary_fingerprint

ASK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class AppModel:
    """One model of a running app, and the deployment of its replicas."""

    app: str
    deployment: str
    config: ClusterConfig


def find_model(app: str, name: str | None) -> AppModel:
    """Return the model that a running app calls `name`, or its only one.

    Raises `BatchError` naming what there is where the app or the model is not there.
    """
    try:
        router: DeploymentHandle[object] = serve.get_deployment_handle("Router", app_name=app)
        told = router.models.remote().result(timeout_s=ASK_SECONDS)
    except (RayServeException, RayError, TimeoutError) as error:
        known = ", ".join(serve.status().applications) or "none"
        raise BatchError(f"no app {app!r} of Squadron answers in this cluster, which has {known}: {error}") from error
    models = [AppModel(app, deployment, resolve_config(settings)) for deployment, settings in told]
    for model in models:
        if name in model.config.names or (name is None and len(models) == 1):
            return model
    names = ", ".join(model.config.model_id for model in models)
    raise BatchError(f"name one of the models of {app} with --model: {names}")


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
