"""`squadron serve`: from a configuration to an address that answers, and back to an empty machine.

Ray comes up in processes of its own. Meanwhile a thread of this one imports what the app needs on it (Serve, torch)
and checks the configuration, so nothing of that is imported with this file.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ray
from rich.text import Text

from cluster.app_config import AppConfig
from cluster.config import ClusterConfig
from cluster.resources import app_resources
from cluster.telemetry.logs import JSON
from deploy.cli.model_files import check_files, sets_engine
from deploy.cli.processes import Interrupted, Interrupts, bounded
from deploy.cli.terminal import terminal
from deploy.serve.address import connect_host, curl, free_port, is_loopback
from deploy.serve.fork_server import ForkServer
from deploy.serve.output import PhaseLog, without_death_notices
from deploy.serve.ray_cluster import JoinedRay, LocalRay, RayCluster, count
from deploy.serve.start_bars import start_bars
from engine.device.machine import collector_paused
from engine.errors import ConfigError

if TYPE_CHECKING:
    from deploy.serve.served_app import ServedApp

# Seconds that running streams get: a user waits after Ctrl-C, SIGTERM comes from a supervisor.
CTRL_C_GRACE = 5.0
DELETE_SECONDS = 10.0
EXIT_SECONDS = 20.0
QUIET_SECONDS = 1800.0  # without a step of any replica that starts: far longer than any takes
SERVE_SECONDS = 180.0  # a machine with 40 processes for 2 cores took less than 60


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options beside the configuration.

    ray_address: cluster to join; None = start one. wait_for_nodes: do not refuse a cluster that is too small now.
    forks: what has its workers forked.
    """

    ray_address: str | None = None
    wait_for_nodes: bool = False
    verbose: bool = False
    forks: ForkServer | None = None


def serve_app(app: AppConfig, options: Options, interrupts: Interrupts) -> None:
    """Serve until stopped. Raises `SquadronError` or `ParallelError` when it does not come up."""
    quiet = nullcontext() if options.verbose else without_death_notices()
    with quiet, Server(app, options, interrupts) as server:
        try:
            server.start()
            server.announce()
            server.watch()
        except Interrupted as stop:
            if not server.ready:
                server.say("Stopping before it was ready.")
                raise
            most = CTRL_C_GRACE if stop.number == signal.SIGINT else math.inf
            server.grace = min(most, app.shared.stream_grace)
            server.say(f"Stopping: running streams get {server.grace:g} s; Ctrl-C again does not wait.")


class Server:
    """One app on one Ray cluster, for as long as it is entered. grace: seconds that its streams get on leaving."""

    def __init__(self, app: AppConfig, options: Options, interrupts: Interrupts) -> None:
        self.ready = False
        self.grace = 0.0
        self._interrupts = interrupts
        self._replicas: list[dict[str, Any]] = []  # as /ready showed them when all were up
        self._app = app
        self._options = options
        self._console = terminal(json_lines=app.shared.log_format == JSON)
        self._phases = PhaseLog(self._console)
        self._cluster: RayCluster | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupts.stopping = True
        self._interrupts.listen()
        if self.ready or not isinstance(error, Interrupted):
            self._stop()
        elif isinstance(self._cluster, JoinedRay) and self._was_served:
            self._served.delete(0.0, with_serve=False)  # all else ends with this command

    def say(self, text: str) -> None:
        """Print one line as it is."""
        self._console.print(text, markup=False)

    def start(self) -> None:
        """Bring everything up, a line per phase. Raises `SquadronError` or `ParallelError`."""
        if self._options.ray_address is None:
            check_files(self._app)
            self._app = _with_ports(self._app)
        elif self._config.grpc_port == 0:
            raise ConfigError(
                "grpc_port: a cluster that is joined needs a port of your choice, such as 9000", "grpc_port"
            )
        with self._phases.phase("Ray") as notes, collector_paused(), _beside(self._prepare) as prepared:
            self._cluster = self._connect()
            prepared.result()
            notes.append(self._cluster.about)
        if not self._options.wait_for_nodes:
            self._served.check_capacity()
        late = f"Serve did not start within {SERVE_SECONDS:g} s; start again with less other work on this machine"
        with self._phases.phase("Serve"), self._interrupts.within(SERVE_SECONDS, late):
            self._served.start_serve(verbose=self._options.verbose)
            self._served.deploy()
        began = time.perf_counter()
        with start_bars(self._console) as bars:
            # Nodes that are waited for may take any time.
            quiet = math.inf if self._options.wait_for_nodes else QUIET_SECONDS
            self._replicas = self._served.wait(bars.take, quiet)
        self._print_phases(time.perf_counter() - began)
        self._interrupts.ready()
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
        if unguarded := self._served.unguarded():
            self._warn(f"{unguarded}.")
        self.say("\n" + curl(self.url, config) + "\n")
        choice = f" --model {names[0]}" if len(names) > 1 else ""
        self.say(f"`squadron chat --url {self.url}{choice}` in another terminal talks to it. Ctrl-C stops it.")

    def _warn(self, text: str) -> None:
        self._console.print(Text.assemble(("Warning:", "bold red"), " ", text))

    def watch(self) -> None:
        """Tell of replicas while the app is there. Raises `StartError` when it is deleted or Ray goes away."""
        self._served.watch(self._replicas)

    def _stop(self) -> None:
        """Delete the app, let its streams finish, and end what was started."""
        if self._cluster is None:
            ray.shutdown()
            return
        try:
            if self._was_served and ray.is_initialized():
                with bounded(self.grace + DELETE_SECONDS, self._cluster.alive):
                    # In a cluster that stays, replicas without streams need a moment of their own.
                    stays = isinstance(self._cluster, JoinedRay)
                    self._served.delete(max(self.grace, DELETE_SECONDS / 2 if stays else 0.0), with_serve=stays)
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

    def _prepare(self) -> None:
        """Import what the app needs of this process and, for a Ray that is started here, check what is to run on it.

        Where nothing is set that might not fit the model, torch, which only that check needs and which takes a core
        for over a second, is left to the replicas: they refuse in the same words what they cannot run.

        Raises `SquadronError` or `ParallelError`.
        """
        if self._options.ray_address is None and sets_engine(self._app):
            from deploy.cli.dry_run import make_plans

            make_plans(self._app)
        _ = self._served

    @cached_property
    def _served(self) -> ServedApp:
        import cluster.light_serve  # noqa: F401  # before anything else imports Serve
        from deploy.serve.served_app import ServedApp

        return ServedApp(self._app, self.url, self.say)

    @property
    def _was_served(self) -> bool:
        return "_served" in vars(self) and self._served.deployed

    def _print_phases(self, waited: float) -> None:
        """A block of lines for each model, under its name where there are several. They start side by side."""
        named = len(self._app.models) > 1
        for config in self._app.models:
            own = [body for body in self._replicas if body["model"] == config.model_id]
            ranks = f"{count(config.replicas, 'replica')} x {count(config.tensor_parallel_size, 'rank')}"
            if named:
                self.say(f"Model {config.model_id}")
            self._phases.replicas(own, waited, ranks)

    def _connect(self) -> RayCluster:
        address, verbose = self._options.ray_address, self._options.verbose
        if address is not None:
            return JoinedRay(address, verbose, self._interrupts)
        # Whether GPUs are used changes nothing about the CPUs.
        placement = app_resources(self._app, lambda _: False)
        ports = [port for port in (self._config.port, self._config.grpc_port) if port is not None]
        return LocalRay(
            placement.cpus + placement.one_more["CPU"], verbose, self._interrupts, self._options.forks, ports
        )


@contextmanager
def _beside(work: Callable[[], None]) -> Iterator[Future[None]]:
    """While entered, `work` is done in a thread, which is waited for.

    One that imports as the interpreter ends can crash in C++. A command that is told to stop ends without that.
    """
    pool = ThreadPoolExecutor(1)
    try:
        yield pool.submit(work)
    except Interrupted:
        raise
    except BaseException:
        pool.shutdown()
        raise
    pool.shutdown()


def _with_ports(app: AppConfig) -> AppConfig:
    """Return the configuration with ports that are free now. Raises `ConfigError`."""
    config = app.shared
    chosen = app.with_shared(port=free_port(config.host, config.port))
    if config.grpc_port is None:
        return chosen
    return chosen.with_shared(grpc_port=free_port(config.host, config.grpc_port, "grpc_port"))
