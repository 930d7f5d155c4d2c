"""The app on Ray Serve, as `squadron serve` brings it up, watches it and deletes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException

from cluster.app import ROUTER, build_version, logging_config, uses_gpu
from cluster.app_config import AppConfig
from cluster.config import ClusterConfig
from cluster.config_values import GATEWAY
from cluster.ingress.router_side import UNGUARDED
from cluster.lifecycle.app_end import announce_end, forget_end
from cluster.lifecycle.control_store import FAILURES
from cluster.lifecycle.rollback import serve_details
from cluster.resources import app_resources
from deploy.cli.client import client_for, is_guarded
from deploy.cli.keys import own_key
from deploy.serve.address import connect_host, free_port
from deploy.serve.output import quiet_serve
from deploy.serve.ray_cluster import check_capacity
from deploy.serve.readiness import Readiness, StartError
from deploy.serve.replica_log import ReplicaLog, listed_replicas

APP = "squadron"
LOOK_SECONDS = 0.5
POLLS_PER_STATUS = 4
TELL_SECONDS = 2.0  # in which Serve stops routers, and clients read the error that ends their streams


class ServedApp:
    """One app on the Ray cluster that this process is connected to.

    url: where its HTTP endpoint is, on this machine. say: prints a line. `deployed`: whether it is to be deleted.
    """

    def __init__(self, app: AppConfig, url: str, say: Callable[[str], None]) -> None:
        self.deployed = False
        self._started_serve = False
        self._version = uuid4().hex
        self._app = app
        self._url = url
        self._say = say

    def check_capacity(self) -> None:
        """Raise `ConfigError` with the numbers when the app does not fit the cluster as it is now."""
        placement = app_resources(self._app, uses_gpu)
        check_capacity(placement, ray.available_resources(), ray.cluster_resources())

    def start_serve(self, *, verbose: bool) -> None:
        """Start Serve, or find the one of the cluster. Raises `StartError`, or `ConfigError` for a taken port."""
        quiet_serve(verbose)
        status = serve.status()
        if APP in status.applications:
            raise StartError(f"an app named {APP} already runs in this cluster; delete it first (`serve shutdown`)")
        if status.proxies and self._config.ingress != GATEWAY:
            self._find_proxy()
            return
        free_port(self._config.host, self._config.port)
        self._started_serve = not status.proxies and not status.applications
        try:
            self._start_once()
        except (RayError, TimeoutError) as error:
            self._say(f"Serve did not start, and is tried once more: {type(error).__name__}")
            try:
                self._start_once()
            except (RayError, TimeoutError) as again:
                raise StartError(
                    f"Serve's proxy did not come up: {type(again).__name__}; "
                    "start again, with less other work on this machine or --verbose to see Serve's log"
                ) from again

    def _start_once(self) -> None:
        alone = self._config.ingress == GATEWAY  # no proxy of Serve's beside it
        serve.start(
            proxy_location=ProxyLocation.Disabled if alone else None,
            http_options={"host": self._config.host, "port": self._config.port},
            logging_config=logging_config(self._config.log_format),
        )

    def deploy(self) -> None:
        """Hand the app to Serve. Raises `StartError` where it is refused."""
        built = build_version(self._app.settings(), {ROUTER: self._version})
        target = serve.RunTarget(built, name=APP, route_prefix="/")
        self.deployed = True
        try:
            forget_end(APP)
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        except RayServeException as error:
            raise StartError(f"Serve refused the app: {str(error).splitlines()[0]}") from error

    def wait(self, show: Callable[[Sequence[Mapping[str, Any]]], None], quiet: float) -> list[dict[str, Any]]:
        """Return what /ready says of each replica once all are ready; show: called with its `states` until then.

        quiet: as of `Readiness`. Raises `StartError`.
        """
        wanted = {config.model_id: config.replicas for config in self._app.models}
        key = own_key(self._config)
        return Readiness(APP, self._url, key, self._version, wanted, self._say, show, quiet).wait()

    def unguarded(self) -> str:
        """Return what is to be said where clients do not hear of dead routers, else nothing."""
        with client_for(self._url, own_key(self._config)) as client:
            return "" if is_guarded(client) else UNGUARDED

    def watch(self, replicas: list[dict[str, Any]]) -> None:
        """Tell of replicas while the app is there. Raises `StartError` when it is deleted or Ray goes away.

        replicas: as /ready showed them when all were up.
        """
        named = len(self._app.models) > 1
        logs = [
            ReplicaLog(
                replicas,
                config.most_replicas,
                self._say,
                config.replica_wait,
                config.model_id if named else "",
                scaled=config.max_replicas is not None,
            )
            for config in self._app.models
        ]
        with client_for(self._url, own_key(self._config)) as client:
            while True:
                for _ in range(POLLS_PER_STATUS):
                    time.sleep(LOOK_SECONDS)
                    listed = listed_replicas(client)
                    if listed is not None:
                        for log in logs:
                            log.update(listed)
                self._check()

    def delete(self, grace: float, *, with_serve: bool) -> None:
        """Have the app deleted and wait for `grace` seconds at most until it is gone.

        Streams that take longer end with an error of their own. with_serve: whether Serve ends, too, where it was
        started here and runs nothing else.
        """
        with suppress(*FAILURES):  # of a Ray that is gone: nothing runs there
            announce_end(APP, grace)
        serve.delete(APP, _blocking=False)
        deadline = time.monotonic() + grace + TELL_SECONDS
        while time.monotonic() < deadline and _is_there(APP):
            time.sleep(0.1)
        if with_serve and self._started_serve and not serve.status().applications:
            serve.shutdown()

    @property
    def _config(self) -> ClusterConfig:
        return self._app.shared

    def _check(self) -> None:
        try:
            gone = APP not in serve.status().applications
        except (RayError, RayServeException, ConnectionError) as error:
            raise StartError(f"Ray is gone: {type(error).__name__}") from error
        if gone:
            self.deployed = False
            raise StartError(f"the app {APP} was deleted by somebody else")

    def _find_proxy(self) -> None:
        """Serve runs in the joined cluster already, and keeps the address that it was started with."""
        options = serve_details().get("http_options", {})
        host, port = options.get("host", ""), options.get("port")
        if port != self._config.port or not (_is_any(host) or connect_host(host) == connect_host(self._config.host)):
            raise StartError(
                f"Serve already runs in this cluster, at http://{connect_host(host)}:{port}: "
                f"give that address with --host {host} --port {port}"
            )
        try:
            httpx.get(f"{self._url}/-/healthz", timeout=5.0, trust_env=False)
        except httpx.HTTPError:
            raise StartError(
                f"Serve already runs in this cluster, but not at {self._url}: give its address with --host and --port"
            ) from None


def _is_any(host: str) -> bool:
    """Whether who listens on `host` is reached by every address of the machine."""
    return host in ("0.0.0.0", "::")  # noqa: S104 - nothing is bound here


def _is_there(app: str) -> bool:
    """Whether an app runs, or nobody can say so now: its streams must not end because Serve's controller restarts."""
    try:
        return app in serve.status().applications
    except (RayError, RayServeException, ConnectionError):
        return True
