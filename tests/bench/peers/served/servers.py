"""The servers that are compared: how each is started, what it is given, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from cluster.config_values import SERVE
from deploy.cli.processes import kill_all
from deploy.demo import demo_model_path
from engine.device.machine import cores
from tests.bench.peers.engines import ENGINES, for_vllm, variables
from tests.bench.peers.environments import RAY, VLLM, last_lines, missing, python_of
from tests.bench.ray_llm import Asked, descendants, served_by_ray_llm
from tests.e2e.command import Command, wait_gone
from tests.e2e.harness import free_port

START = 600.0  # seconds until a server serves
STOP = 60.0  # seconds in which it ends by itself
LOOK = 0.2
MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 256
CACHE = 2  # GiB of keys and values of each replica
SCRIPT = Path(__file__).with_name("serve_vllm.py")
OURS = "Squadron"


class ServerError(Exception):
    """A server did not start; the message ends with its last lines."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a server is started with. root: of the peers' environments. home: a folder for what ours compiles."""

    replicas: int
    dtype: str
    root: Path
    home: Path

    @property
    def threads(self) -> int:
        """Threads of each replica: all of them have every core once."""
        return max(1, cores() // self.replicas)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that serves. pid: of the process that has started all others. given: as its user would read it."""

    port: int
    pid: int
    given: str


@dataclass(frozen=True, slots=True)
class Server:
    """One that is compared. environment: that it runs in; None = this one."""

    name: str
    version: str
    run: Callable[[Setting], AbstractContextManager[Running]]
    environment: str | None = None

    def absent(self, root: Path) -> str | None:
        """Return why it cannot be started, or None where it can."""
        return missing(self.environment, root) if self.environment else None


@contextmanager
def squadron(setting: Setting, ingress: str | None = None) -> Iterator[Running]:
    """`squadron serve demo`. ingress: None = its default."""
    flags = ["serve", "demo", "--dtype", setting.dtype, "--replicas", str(setting.replicas)]
    # Ray gives each replica as many threads as CPUs.
    flags += ["--cpus-per-worker", str(setting.threads), *(["--ingress", ingress] if ingress else [])]
    port = free_port()
    command = Command(*flags, "--port", str(port), home=setting.home, PYTHONPATH=os.pathsep.join(_ours()))
    try:
        try:
            command.wait_for("Ctrl-C stops it")
        except AssertionError:
            raise ServerError(f"squadron serve did not serve:\n{last_lines(command.text)}") from None
        yield Running(port, command.process.pid, f"`squadron {' '.join(flags)}`")
    finally:
        try:
            with suppress(subprocess.TimeoutExpired):
                command.ctrl_c()
        finally:
            command.kill()


@contextmanager
def vllm(setting: Setting) -> Iterator[Running]:
    """`vllm serve`; of several replicas, each is a data-parallel rank."""
    flags = ["serve", str(demo_model_path()), "--served-model-name", "demo", "--dtype", setting.dtype]
    flags += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    if setting.replicas > 1:
        flags += ["--data-parallel-size", str(setting.replicas)]
    given = {"VLLM_CPU_OMP_THREADS_BIND": bound(setting), "VLLM_CPU_KVCACHE_SPACE": str(CACHE)}
    said = variables(ENGINES["vllm"], "native", setting.root) | given | {"VLLM_NO_USAGE_STATS": "1"}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # which would be those of its other processes, too
        del said[name]
    port = free_port()
    command = [str(python_of("vllm", setting.root)), str(SCRIPT), *flags, "--host", "127.0.0.1", "--port", str(port)]
    with _process(command, said, port) as process:
        shown = " ".join(["vllm", flags[0], "demo", *flags[2:]])
        yield Running(port, process.pid, f"`{shown}`; {_told(given | _preloaded(said))}")


@contextmanager
def ray_llm(setting: Setting) -> Iterator[Running]:
    """Ray Serve LLM: `serve.run(build_openai_app(...))`."""
    given = {"VLLM_CPU_KVCACHE_SPACE": str(CACHE), "VLLM_CPU_OMP_THREADS_BIND": bound(setting)}
    if setting.replicas > 1:  # none knows of the others, so that all would be bound to the same cores
        given |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(setting.threads)}
    engine = {"dtype": setting.dtype, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS}
    said = given | for_vllm(setting.root / "ray-llm")
    asked = Asked(setting.replicas, setting.threads, engine, said)
    port = free_port()
    with ExitStack() as stack:
        try:
            told = stack.enter_context(served_by_ray_llm(python_of("ray-llm", setting.root), port, asked))
        except RuntimeError as error:
            raise ServerError(str(error)) from None
        what = f"`LLMConfig` with num_replicas={setting.replicas}, {setting.threads} CPUs each, {_told(engine)}"
        yield Running(port, told.pid, f"{what}; {_told(given | _preloaded(said))}")


SERVERS = {
    "squadron": Server(OURS, version("squadron"), squadron),
    "squadron-serve": Server(f"{OURS}, --ingress serve", version("squadron"), partial(squadron, ingress=SERVE)),
    "vllm": Server("vllm serve", f"vllm-cpu {VLLM}", vllm, "vllm"),
    "ray": Server("Ray Serve LLM", f"ray {RAY}, vllm-cpu {VLLM}", ray_llm, "ray-llm"),
}


def bound(setting: Setting) -> str:
    """Return the cores of each replica, as vLLM wants them: 0,1 of one, 0|1 of two."""
    mine = sorted(os.sched_getaffinity(0))
    shares = [mine[i * setting.threads : (i + 1) * setting.threads] for i in range(setting.replicas)]
    return "|".join(",".join(map(str, share or mine[-1:])) for share in shares)


@contextmanager
def _process(command: list[str], environment: dict[str, str], port: int) -> Iterator[subprocess.Popen]:
    """Have a server run in the block, from when it answers. Raises `ServerError`."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, cwd=tempfile.gettempdir(), env=environment, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            if why := _until_healthy(process, port):
                said.seek(0)
                raise ServerError(f"{why}:\n{last_lines(said.read())}")
            yield process
        finally:
            started = descendants(process.pid)
            try:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP)
            finally:
                kill_all(started)
                process.kill()
                process.wait()
                wait_gone(started)  # what still ends takes time from the next server


def _until_healthy(process: subprocess.Popen, port: int) -> str | None:
    """Wait until `/health` answers; return why it will not."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        with suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
            return None
        with suppress(subprocess.TimeoutExpired):
            return f"it ended with {process.wait(LOOK)}"
    return f"it did not serve within {START:g} s"


def _ours() -> list[str]:
    """Return where the code of this tree lies, first, for the processes of `squadron serve`."""
    tree = str(Path(__file__).parents[4])
    return [tree, *filter(None, [os.environ.get("PYTHONPATH")])]


def _preloaded(said: dict[str, str]) -> dict[str, str]:
    return {"LD_PRELOAD": " ".join(Path(one).name for one in said["LD_PRELOAD"].split(":"))}


def _told(given: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items())
