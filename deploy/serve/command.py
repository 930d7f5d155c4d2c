"""`squadron serve`: from a configuration to an address that answers, and back to an empty machine."""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException
from rich.text import Text

from cluster.app import build, logging_config, uses_gpu
from cluster.app_config import AppConfig
from cluster.config import ClusterConfig
from cluster.config_values import GATEWAY
from cluster.ingress.router_side import UNGUARDED
from cluster.resources import app_resources
from cluster.telemetry.logs import JSON
from deploy.cli.client import client_for, is_guarded
from deploy.cli.dry_run import check_folders, make_plans
from deploy.cli.keys import own_key
from deploy.cli.processes import Interrupted, Interrupts, bounded, descendants
from deploy.cli.terminal import terminal
from deploy.serve.address import connect_host, curl, free_port, is_loopback
from deploy.serve.haproxy import HAProxySetup, exposed
from deploy.serve.output import PhaseLog, ReplicaLog, listed_replicas, quiet_serve, without_death_notices
from deploy.serve.ray_cluster import JoinedRay, LocalRay, RayCluster, check_capacity, count
from deploy.serve.readiness import Readiness, StartError
from engine.errors import ConfigError

APP = "squadron"
# Seconds that running streams get: a user waits after Ctrl-C, SIGTERM comes from a supervisor.
CTRL_C_GRACE = 5.0
DELETE_SECONDS = 10.0
EXIT_SECONDS = 20.0
LOOK_SECONDS = 0.5
POLLS_PER_STATUS = 4


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options beside the configuration.

    ray_address: cluster to join; None = start one. wait_for_nodes: do not refuse a cluster that is too small now.
    haproxy: what the HAProxy of a Ray that is started here was given.
    """

    ray_address: str | None = None
    wait_for_nodes: bool = False
    verbose: bool = False
    haproxy: HAProxySetup | None = None


def serve_app(app: AppConfig, options: Options) -> None:
    """Serve until stopped. Raises `SquadronError` or `ParallelError` when it does not come up."""
    quiet = nullcontext() if options.verbose else without_death_notices()
    with Interrupts() as interrupts, quiet:
        server = Server(app, options)
        grace = 0.0
        try:
            server.start(interrupts)
            server.announce()
            server.watch()
        except Interrupted as stop:
            if not server.ready:
                server.say("Stopping before it was ready.")
                raise SystemExit(128 + stop.number) from None
            grace = CTRL_C_GRACE if stop.number == signal.SIGINT else app.shared.drain_timeout
            server.say(f"Stopping: running streams get {grace:g} s; Ctrl-C again does not wait.")
        finally:
            interrupts.stopping = True
            server.stop(grace)


class Server:
    """One app on one Ray cluster, for as long as the command runs."""

    def __init__(self, app: AppConfig, options: Options) -> None:
        self.ready = False
        self._replicas: list[dict[str, Any]] = []  # as /ready showed them when all were up
        self._app = app
        self._options = options
        self._console = terminal(json_lines=app.shared.log_format == JSON)
        self._phases = PhaseLog(self._console)
        self._cluster: RayCluster | None = None
        self._deployed = False
        self._started_serve = False

    def say(self, text: str) -> None:
        """Print one line as it is."""
        self._console.print(text, markup=False)

    def start(self, interrupts: Interrupts) -> None:
        """Bring everything up, a line per phase. Raises `SquadronError` or `ParallelError`."""
        if self._options.ray_address is None:
            make_plans(self._app)
            check_folders(self._app)
            self._app = _with_ports(self._app)
        elif self._config.grpc_port == 0:
            raise ConfigError(
                "grpc_port: a cluster that is joined needs a port of your choice, such as 9000", "grpc_port"
            )
        with self._phases.phase("Ray") as notes:
            self._cluster = self._connect()
            notes.append(self._cluster.about)
        interrupts.listen()
        self._check_capacity()
        with self._phases.phase("Serve"):
            self._start_serve()
            self._deploy()
        began = time.perf_counter()
        with self._phases.waiting("Replicas"):
            self._replicas = self._readiness().wait()
        self._print_phases(time.perf_counter() - began)
        self.ready = True

    def announce(self) -> None:
        """Say where the model is served and how to ask it."""
        config, names = self._config, self._app.names
        self._phases.total(f"{self.url}/v1   model{'s' if len(names) > 1 else ''} {', '.join(names)}")
        self.say(f"Page: {self.url}/ui" + (", where the password is an API key" if config.keyed else ""))
        if config.grpc_port is not None:
            self.say(f"gRPC: {connect_host(config.host)}:{config.grpc_port}, service squadron.v1.Inference")
        if not is_loopback(config.host) and not config.keyed:
            self._warn(
                f"anybody who reaches {config.host} can use this server: set --api-key, SQUADRON_API_KEY or "
                "--api-key-file."
            )
        self._print_ingress()
        self.say("\n" + curl(self.url, config) + "\n")
        choice = f" --model {names[0]}" if len(names) > 1 else ""
        self.say(f"`squadron chat --url {self.url}{choice}` in another terminal talks to it. Ctrl-C stops it.")

    def _print_ingress(self) -> None:
        """Say what listens beside the address that was asked for, and warn of what is not as it should be."""
        haproxy = self._options.haproxy
        if haproxy is None:
            with client_for(self.url, own_key(self._config)) as client:
                if not is_guarded(client):
                    self._warn(f"{UNGUARDED}.")
            return
        self.say(haproxy.about())
        found = exposed(descendants()) if is_loopback(self._config.host) else []
        if found:
            self._warn(f"HAProxy listens on {', '.join(found)} as well: fence it.")

    def _warn(self, text: str) -> None:
        self._console.print(Text.assemble(("Warning:", "bold red"), " ", text))

    def watch(self) -> None:
        """Tell of replicas while the app is there. Raises `StartError` when it is deleted or Ray goes away."""
        named = len(self._app.models) > 1
        logs = [
            ReplicaLog(
                self._replicas,
                config.most_replicas,
                self.say,
                config.model_id if named else "",
                scaled=config.max_replicas is not None,
            )
            for config in self._app.models
        ]
        with client_for(self.url, own_key(self._config)) as client:
            while True:
                for _ in range(POLLS_PER_STATUS):
                    time.sleep(LOOK_SECONDS)
                    listed = listed_replicas(client)
                    if listed is not None:
                        for log in logs:
                            log.update(listed)
                self._check_app()

    def stop(self, grace: float) -> None:
        """Delete the app, let its streams finish for `grace` seconds, and end what was started."""
        if self._cluster is None:
            ray.shutdown()
            return
        try:
            if self._deployed and ray.is_initialized():
                with bounded(grace + DELETE_SECONDS, self._cluster.alive):
                    self._delete(grace)
        finally:
            with bounded(EXIT_SECONDS):
                self._cluster.stop()

    @property
    def _config(self) -> ClusterConfig:
        """The settings that concern the whole app."""
        return self._app.shared

    @property
    def url(self) -> str:
        """Where the HTTP endpoint is, on this machine."""
        return f"http://{connect_host(self._config.host)}:{self._config.port}"

    def _print_phases(self, waited: float) -> None:
        """A block of lines for each model, under its name where there are several. They start side by side."""
        named = len(self._app.models) > 1
        for config in self._app.models:
            own = [body for body in self._replicas if body["model"] == config.model_id]
            ranks = f"{count(config.replicas, 'replica')} x {count(config.tensor_parallel_size, 'rank')}"
            if named:
                self.say(f"Model {config.model_id}")
            self._phases.replicas(own, waited, ranks)

    def _check_app(self) -> None:
        try:
            gone = APP not in serve.status().applications
        except (RayError, RayServeException, ConnectionError) as error:
            raise StartError(f"Ray is gone: {type(error).__name__}") from error
        if gone:
            self._deployed = False
            raise StartError(f"the app {APP} was deleted by somebody else")

    def _connect(self) -> RayCluster:
        address, verbose = self._options.ray_address, self._options.verbose
        if address is not None:
            return JoinedRay(address, verbose)
        # Whether GPUs are used changes nothing about the CPUs.
        placement = app_resources(self._app, lambda _: False)
        return LocalRay(placement.cpus + placement.one_more["CPU"], verbose)

    def _check_capacity(self) -> None:
        if not self._options.wait_for_nodes:
            placement = app_resources(self._app, uses_gpu)
            check_capacity(placement, ray.available_resources(), ray.cluster_resources())

    def _start_serve(self) -> None:
        quiet_serve(self._options.verbose)
        status = serve.status()
        if APP in status.applications:
            raise StartError(f"an app named {APP} already runs in this cluster; delete it first (`serve shutdown`)")
        if status.proxies and self._config.ingress != GATEWAY:
            self._find_proxy()
            return
        free_port(self._config.host, self._config.port)
        self._started_serve = not status.proxies and not status.applications
        try:
            alone = self._config.ingress == GATEWAY  # no proxy of Serve's beside it
            serve.start(
                proxy_location=ProxyLocation.Disabled if alone else None,
                http_options={"host": self._config.host, "port": self._config.port},
                logging_config=logging_config(self._config.log_format),
            )
        except (RayError, TimeoutError) as error:
            raise StartError(
                f"Serve's proxy did not come up: {type(error).__name__}; "
                "start again, with less other work on this machine or --verbose to see Serve's log"
            ) from error

    def _find_proxy(self) -> None:
        """Serve runs in the joined cluster already, and keeps the address that it was started with."""
        try:
            httpx.get(f"{self.url}/-/healthz", timeout=5.0, trust_env=False)
        except httpx.HTTPError:
            raise StartError(
                f"Serve already runs in this cluster, but not at {self.url}: give its address with --host and --port"
            ) from None

    def _deploy(self) -> None:
        target = serve.RunTarget(build(self._app.settings()), name=APP, route_prefix="/")
        self._deployed = True
        try:
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        except RayServeException as error:
            raise StartError(f"Serve refused the app: {str(error).splitlines()[0]}") from error

    def _readiness(self) -> Readiness:
        wanted = {config.model_id: config.replicas for config in self._app.models}
        return Readiness(APP, self.url, own_key(self._config), wanted, self.say)

    def _delete(self, grace: float) -> None:
        serve.delete(APP, _blocking=False)
        # In a cluster that stays, replicas without streams need a moment of their own.
        deadline = time.monotonic() + max(grace, DELETE_SECONDS / 2 if isinstance(self._cluster, JoinedRay) else 0.0)
        while time.monotonic() < deadline and _is_there(APP):
            time.sleep(0.1)
        if isinstance(self._cluster, JoinedRay) and self._started_serve and not serve.status().applications:
            serve.shutdown()


def _is_there(app: str) -> bool:
    """Whether an app runs, or nobody can say so now: its streams must not end because Serve's controller restarts."""
    try:
        return app in serve.status().applications
    except (RayError, RayServeException, ConnectionError):
        return True


def _with_ports(app: AppConfig) -> AppConfig:
    """Return the configuration with ports that are free now. Raises `ConfigError`."""
    config = app.shared
    chosen = app.with_shared(port=free_port(config.host, config.port))
    if config.grpc_port is None:
        return chosen
    return chosen.with_shared(grpc_port=free_port(config.host, config.grpc_port, "grpc_port"))
