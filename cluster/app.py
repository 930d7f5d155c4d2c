"""The Serve app: `serve run cluster.app:build model=demo`, `serve deploy FILE`, or the `squadron serve` command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cluster.app_config import parse_app
from cluster.config import NO_KEYS, ClusterConfig, scaling_settings
from cluster.config_values import SERVE
from cluster.deployments.gateway import Gateway, GrpcGateway
from cluster.deployments.replica import Replica
from cluster.deployments.router import Router, RouterBehindGateway
from cluster.lifecycle.leases import LeaseRequestRouter
from cluster.lifecycle.rollback import BuiltOf
from cluster.lifecycle.serve_autoscaling import autoscaling_config
from cluster.lifecycle.updates import ONE_MORE, fits
from cluster.model_names import resolve_model
from cluster.resources import BATCHES_CPUS, GATEWAY_CPUS, ROUTER_CPUS, AppResources, app_resources, deployment_names
from cluster.telemetry.logs import JSON
from engine.config import CPU_TOKENS, GPU_TOKENS
from engine.loader.fingerprint import model_fingerprint

ROUTER = "Router"
GATEWAYS = "Gateway"
BATCHES = "Batches"
# Serve's own limits must never be what holds a request back: admission is the router's job.
UNLIMITED_REQUESTS = 100_000
# Seconds without an answer that count as one failed check; Serve replaces a replica after three in a row. What takes
# long delays no answer: loading and warm-up come before the first check, and a step, however long, runs in
# a thread of its own that lets go of the interpreter while the device computes. So this bounds how long the event
# loop may stand still: only a process that is stopped, or swapped out, is silent for three times as long.
REPLICA_ANSWER = 3.0
# A router is checked on another event loop than the one its requests run on, so that no burst of these looks like its
# end. One that is stopped is dead after three checks, and its clients have their error, within 10 s of the fault.
ROUTER_ANSWER = 2.0


_LEASES = RequestRouterConfig(request_router_class=LeaseRequestRouter, initial_backoff_s=0.02, max_backoff_s=0.1)


def build(args: dict[str, Any]) -> Application:
    """Return the app for `args`: the settings of `ClusterConfig`, by name, dashes or underscores, or `models`.

    Raises `ConfigError` naming the setting, or `CheckpointError` naming the file: what is served before goes on then.
    """
    return build_version(args, {})


def build_version(args: Mapping[str, Any], versions: Mapping[str, str]) -> Application:
    """Return the app for `args` with these versions of its deployments, by name; a new one where none is given.

    `serve.run` leaves copies alone whose version is the one that it deploys. An app from a config file has the
    version that Serve makes of the file instead. Raises as `build`.
    """
    app = parse_app(args).behind(SERVE)
    names = deployment_names(app)
    # The name travels, not the folder: each node finds its own copy.
    settings = [
        asdict(replace(config, served_model_name=config.names, max_num_batched_tokens=_step_tokens(config)))
        for config in app.models
    ]
    for config in app.models:
        _refuse_damaged(resolve_model(config.model))
    versions = {name: uuid4().hex[:8] for name in (*names, ROUTER, GATEWAYS, BATCHES)} | dict(versions)
    placement = app_resources(app, uses_gpu)
    surge = _surge(app.shared, placement)
    replicas = []
    for config, name, own, placed in zip(app.models, names, settings, placement.models, strict=True):
        title = config.model_id if app.listed else ""
        deployment = _versioned(_replica(config, name, placed.bundles, surge), versions)
        replicas.append(deployment.bind({**own, **NO_KEYS}, title))
    shared = app.shared
    router = _versioned(_router(shared, surge), versions)
    batches = None
    if app.shared.batch_dir is not None:
        batches = _versioned(_batches(app.shared), versions).bind(settings, replicas)
    beside = [replicas, BuiltOf(app.settings(), versions), batches]
    if not shared.gateways:
        return router.bind(settings, *beside)
    gateway = _versioned(_gateway(shared, surge), versions)
    if shared.ingress == SERVE:
        return router.bind(settings, *beside, gateway.bind(settings[0], ROUTER))
    return gateway.bind(settings[0], router.bind(settings, *beside))


def logging_config(log_format: str) -> LoggingConfig:
    """Return how Serve writes its lines, until our processes take its handlers over (`cluster.telemetry.logs`)."""
    return LoggingConfig(enable_access_log=False, encoding="JSON" if log_format == JSON else "TEXT")


def uses_gpu(config: ClusterConfig) -> bool:
    """Whether replicas are placed on GPUs: as the device says, or where the cluster has any."""
    if config.device is not None:
        return config.device.startswith("cuda")
    return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0


def _step_tokens(config: ClusterConfig) -> int:
    """Return the tokens of a step, decided here so that routers count on what replicas do."""
    return config.max_num_batched_tokens or (GPU_TOKENS if uses_gpu(config) else CPU_TOKENS)


def _refuse_damaged(model: str) -> None:
    """Look at a folder's files before anything that serves is stopped for them. A hub id is left to the replicas."""
    if Path(model).is_dir():
        model_fingerprint(model, "")


def _versioned(deployment: serve.Deployment, versions: Mapping[str, str]) -> serve.Deployment:
    """Say which version a deployment is. The argument is not public: where Serve has it no more, a rollback restarts
    the copies that are left as well."""
    try:
        return deployment.options(_internal=True, version=versions[deployment.name])
    except (TypeError, ValueError):
        return deployment


def _surge(config: ClusterConfig, placement: AppResources) -> int:
    """Return Serve's `max_surge_percent`.

    Without room for one more, an update that waits for it would never end.
    """
    if config.max_surge_percent is not None:
        return config.max_surge_percent
    free = ray.available_resources() if ray.is_initialized() else {}
    return ONE_MORE if fits(placement.one_more, free) else 0


def _replica(config: ClusterConfig, name: str, bundles: Sequence[dict[str, float]], surge: int) -> serve.Deployment:
    scaling = scaling_settings(config)
    return serve.deployment(
        Replica,
        name=name,
        num_replicas=config.replicas if scaling is None else None,
        autoscaling_config=None if scaling is None else autoscaling_config(scaling, config.replicas),
        placement_group_bundles=list(bundles),
        placement_group_strategy="PACK",
        ray_actor_options={"num_cpus": bundles[0]["CPU"], "num_gpus": bundles[0].get("GPU", 0)},
        max_ongoing_requests=UNLIMITED_REQUESTS,
        max_constructor_retry_count=3,
        health_check_period_s=1,
        health_check_timeout_s=REPLICA_ANSWER,
        graceful_shutdown_timeout_s=config.drain_timeout,
        max_surge_percent=surge,
        request_router_config=_LEASES,
        logging_config=logging_config(config.log_format),
    )


def _router(config: ClusterConfig, surge: int) -> serve.Deployment:
    kind = Router if config.ingress == SERVE else RouterBehindGateway
    found_by = {"request_router_config": _LEASES} if config.gateways else {}
    return _front(config, surge)(kind, name=ROUTER, ray_actor_options={"num_cpus": ROUTER_CPUS}, **found_by)


def _gateway(config: ClusterConfig, surge: int) -> serve.Deployment:
    kind = GrpcGateway if config.ingress == SERVE else Gateway
    return _front(config, surge)(kind, name=GATEWAYS, ray_actor_options={"num_cpus": GATEWAY_CPUS})


def _front(config: ClusterConfig, surge: int) -> Callable[..., serve.Deployment]:
    """Return what makes the deployment of a process that stands before the replicas."""
    return partial(
        serve.deployment,
        num_replicas=config.routers,
        max_ongoing_requests=UNLIMITED_REQUESTS,
        max_constructor_retry_count=3,
        health_check_period_s=1,
        health_check_timeout_s=ROUTER_ANSWER,
        graceful_shutdown_timeout_s=config.drain_timeout,
        max_surge_percent=surge,
        logging_config=logging_config(config.log_format),
    )


def _batches(config: ClusterConfig) -> serve.Deployment:
    from cluster.deployments.batches import Batches

    return serve.deployment(
        Batches,
        name=BATCHES,
        num_replicas=1,
        ray_actor_options={"num_cpus": BATCHES_CPUS},
        max_constructor_retry_count=3,
        health_check_period_s=1,
        health_check_timeout_s=REPLICA_ANSWER,
        # What it has done is kept, and another goes on with it: there is nothing to wait for.
        graceful_shutdown_timeout_s=1,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=logging_config(config.log_format),
    )
