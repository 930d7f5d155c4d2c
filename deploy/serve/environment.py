"""The one place where environment variables are read and set."""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import psutil

from cluster.ingress.guard import CALLBACK, CALLBACK_VARIABLE
from cluster.private_files import close_to_others
from engine.device.machine import SPIN
from engine.errors import ConfigError
from engine.kernels.compiler import chosen_isa
from engine.near_name import near_name

AUTO = "auto"
API_KEY, METRICS_KEY = KEYS = ("SQUADRON_API_KEY", "SQUADRON_METRICS_KEY")
GCS_FLAG = "--gcs-address="


def private_ray(address: str) -> str | None:
    """Return the address of the Ray on loopback that `address` (a host and port, or auto) means; None = another Ray.

    auto means it where no other Ray runs on this machine. Raises `ConfigError` where several on loopback do.
    """
    if address != AUTO:
        return address if on_loopback(address) else None
    running = running_rays()
    private = [one for one in running if on_loopback(one)]
    if len(private) > 1 and private == running:
        raise ConfigError(
            f"RAY_ADDRESS=auto may mean any of {', '.join(private)}, which run here; set it to one of them", "address"
        )
    return private[0] if private and private == running else None


def running_rays() -> list[str]:
    """Return the addresses of all clusters that have a node on this machine, as its raylets were told."""
    found = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet":
            words = process.info["cmdline"] or []
            found |= {word.removeprefix(GCS_FLAG) for word in words if word.startswith(GCS_FLAG)}
    return sorted(found)


def on_loopback(address: str) -> bool:
    """Whether the port of `address` is open on this machine, and to no other machine."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or not _is_loopback(host.strip("[]")):
        return False
    try:
        listening = [one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    except psutil.AccessDenied:
        return False  # macOS tells root alone; there Ray keeps to loopback by itself
    hosts = [laddr.ip for laddr in listening if laddr and laddr.port == int(port)]
    return bool(hosts) and all(_is_loopback(one) for one in hosts)


def _is_loopback(host: str) -> bool:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


# What a Ray of our own is started with; a variable that is set already is left alone.
# Ray has no switch of its own for "this machine only": the flag of its macOS and Windows builds, which puts all its
# servers on 127.0.0.1, does the same on Linux. Serve's replicas listen on every interface all the same, so that
# tokens stay on: nothing on those ports is answered without one.
# Ranks, routers and Ray share this machine's cores: a thread that spins in OpenMP's barrier keeps the core from the
# one that it waits for, and one that never spins is slow to wake. Measured with the demo model on 2 cores, a token
# beside one busy process and a product of 1024 x 1024 by one row on a quiet machine: spinning for long (libgomp's
# default) 2.7 to 6 ms and 21 us, not at all (OMP_WAIT_POLICY=PASSIVE) 1.9 ms and 74 us, 1,000 turns 2 ms and 45 us.
# Ray runs its workers at niceness 15, where any other busy process gets 28 times their share of a core.
# Measured with 2 replicas x 2 ranks on 2 cores beside two busy processes, so and without: ready after 228 and 19 s;
# 200 tokens of one stream in 38.6 and 2.7 s. Started under `nice`, workers are as nice as that. In pods nothing else
# shares their cores, and Ray's own processes keep the precedence that it gives them.
# A replica that no longer answers its health checks is killed at once: it cannot finish anything, its streams have
# gone elsewhere, and until it is dead its GPUs are not free for the one in its place (Serve would ask it to stop and
# wait 30 s). On a cluster that is joined, the command that starts Ray sets this.
# A proxy that hangs holds the connections of all its clients, which hear of it when it is dead: three checks of 1.5 s
# find it, and Ray waits a second for a process that does not end itself; 8 s in all, where the defaults take 50. One
# that is dead already is replaced after 2 s, not 30.
# Each worker imports Serve before its first task, and leaves pandas out.
# Ray answers its first driver when the workers that it starts beforehand have registered; on a busy machine these
# miss their time, and the driver waits for ever. So none is started beforehand.
# Titles of processes leave their environment alone, which says whose they are (`deploy.cli.command_watch`).
LOCAL_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    **SPIN,
    "RAY_worker_niceness": "0",
    "RAY_preload_python_modules": "cluster.light_serve",
    "RAY_prestart_worker_first_driver": "0",
    "SPT_NOENV": "1",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "1.5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    "RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S": "0.5",
    "RAY_kill_worker_timeout_milliseconds": "1000",
    CALLBACK_VARIABLE: CALLBACK,
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Nothing of ours travels through Ray's object store: the least that Ray likes is plenty.
OBJECT_STORE_BYTES = 128 * 2**20
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the commands take from the environment.

    ray_address: `RAY_ADDRESS`, the Ray cluster to join; None = start one.
    api_key: `SQUADRON_API_KEY`, for `--api-key`, so that the key need not stand on a command line.
    metrics_key: `SQUADRON_METRICS_KEY`, for `--metrics-key`.
    source_date_epoch: `SOURCE_DATE_EPOCH`, seconds since 1970 that stand for now in what is written; None = the
    clock. Source: reproducible-builds.org, "SOURCE_DATE_EPOCH".
    ray_tmpdir: `RAY_TMPDIR`, where Ray keeps its files; None = with the system's temporary files.
    of_vllm: names of variables that only vLLM reads.
    misspelt: names that are nearly those of the keys' variables, and which of these was meant.
    """

    ray_address: str | None = None
    api_key: str | None = None
    metrics_key: str | None = None
    source_date_epoch: int | None = None
    ray_tmpdir: str | None = None
    of_vllm: tuple[str, ...] = ()
    misspelt: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Read `variables`, by default this process's. An empty variable counts as unset."""
        variables = os.environ if variables is None else variables
        return cls(
            ray_address=variables.get("RAY_ADDRESS") or None,
            api_key=variables.get(API_KEY) or None,
            metrics_key=variables.get(METRICS_KEY) or None,
            source_date_epoch=_seconds(variables.get("SOURCE_DATE_EPOCH") or None),
            ray_tmpdir=variables.get("RAY_TMPDIR") or None,
            of_vllm=tuple(name for name, value in variables.items() if name.startswith("VLLM_") and value),
            misspelt=tuple(_misspelt(name for name, value in variables.items() if value)),
        )

    @property
    def ray_logs(self) -> str:
        """The folder of the logs of the Ray that was started last on this machine."""
        return f"{self.ray_tmpdir or gettempdir()}/ray/session_latest/logs"


def _misspelt(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        meant = near_name(name, KEYS) if name.startswith("SQUADRON_") and name not in KEYS else None
        if meant is not None:
            yield name, meant


def _seconds(text: str | None) -> int | None:
    if text is not None and not text.isdecimal():
        raise ConfigError(f"SOURCE_DATE_EPOCH must be seconds since 1970, such as 1700000000, not {text!r}", "")
    return None if text is None else int(text)


def check_inherited() -> None:
    """Check what replicas on a Ray of our own inherit of this process's variables: they would refuse it late.

    Raises `ConfigError`.
    """
    chosen_isa()


def prepare_local_ray() -> None:
    """Pin what Ray would take from the machine. Must come before the first import of ray, which reads some of it."""
    for name, value in LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    if os.environ["RAY_AUTH_MODE"] == "token" and not any(os.environ.get(name) for name in TOKEN_VARIABLES):
        _ensure_token(Path.home() / ".ray" / "auth_token")


def prepare_ray(address: str | None) -> str | None:
    """Make ready for the Ray that RAY_ADDRESS names, None = one of our own; return the address to join it by.

    Must come before the first import of ray. Raises `ConfigError`.
    """
    private = None if address is None else private_ray(address)
    if address is None or private is not None:
        # Also to join a Ray on loopback: without the switch, Ray would look for it at the machine's other address.
        prepare_local_ray()
    return private or address


def _ensure_token(path: Path) -> None:
    """Make the file that Ray looks for, its owner's alone to read (Ray lets everybody read the one that it makes)."""
    if path.is_file():
        close_to_others(path)
        return
    token = secrets.token_hex(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        # A home that cannot be written to: this process and its children share the token in their environment.
        os.environ["RAY_AUTH_TOKEN"] = token
        return
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(token)
