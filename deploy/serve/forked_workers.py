"""The fork server's own process: imports, then forks a worker for whoever connects (`deploy.serve.worker_shim`).

    python -m deploy.serve.forked_workers SOCKET PARENT

Ray's library reads its settings as it is loaded, among them the process id of its node: Ray is imported when that is
told, on standard input, all else before. There is one thread, and no import draws a random number from Ray's
generator, as all forks would draw the same ones after it; both are checked.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from cluster.replica.orphans import RAYLET
from deploy.serve.worker_shim import DO, WILL

WITHOUT_RAY = (
    "aiohttp",
    "anyio._backends._asyncio",
    "fastapi",
    "grpc",
    "jsonschema",
    "opentelemetry.sdk.trace",
    "prometheus_client",
    "pyarrow.json",
    "pydantic.v1",
    "requests",
    "transformers.utils.chat_template_utils",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "torch",
    "engine.worker.executor_start",
)
WITH_RAY = (
    "ray._private.workers.default_worker",
    "cluster.light_serve",
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "cluster.deployments.gateway_host",
    "cluster.deployments.replica",
    "cluster.deployments.router_host",
    "cluster.replica.host",
    "cluster.replica.worker_group",
)
# Read by OpenMP, OpenBLAS and Arrow's allocator as they are loaded: there must be but one thread, as none survives a
# fork. A worker has values of its own; a rank sets its own number of threads.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
JOB = "RAY_JOB_ID"  # environment variable of Ray's workers
ANY_JOB = "ffffffff"  # of a worker that is told its job with its first task
# What a worker's environment may have of its own: set for each, and none but the job is read as Ray is loaded.
OWN = frozenset({JOB, RAYLET, "RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS", "SPT_NOENV"})
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DRAW = 16  # bytes that two forks must draw apart
ASKING = 5.0  # seconds that one worker's question may take: others wait behind it


class Server:
    """Answers connections one after the other. A worker is refused whose environment is another one than this one's.

    listener: on a socket in a folder of its own, which goes with it. node: Ray's, a descriptor that is readable when
    that process has ended.
    """

    def __init__(self, listener: socket.socket, node: int, environment: Mapping[str, str]) -> None:
        self._listener = listener
        self._folder = Path(listener.getsockname()).parent
        self._node = node
        self._environment = _comparable(environment)
        self._died, self._told = socket.socketpair()
        for end in (self._died, self._told):
            end.setblocking(False)
        signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)

    def run(self) -> NoReturn:
        """Serve until Ray's node is gone, and end this process then."""
        while True:
            waits: list[Any] = [self._listener, self._died, self._node]
            ready, _, _ = select.select(waits, [], [])
            if self._node in ready:
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(0)  # at once: signals of workers that die now have nowhere to go in an interpreter that ends
            if self._died in ready:
                self._reap()
            if self._listener in ready:
                connection, _ = self._listener.accept()
                with connection:
                    asked = self._asked(connection)
                if asked is not None and os.fork() == 0:
                    self._leave()
                    become_worker(asked)

    def _asked(self, connection: socket.socket) -> dict[str, Any] | None:
        """Return which worker is to be forked; None for one of another kind, or where nobody waits for it."""
        connection.settimeout(ASKING)
        try:
            with connection.makefile("rb") as told:
                asked: dict[str, Any] = json.loads(told.readline())
            if _comparable(asked["environment"]) != self._environment or not _is_plain(asked["arguments"]):
                return None
            connection.sendall(WILL)
            # Who has given up meanwhile has Ray start the worker: it must not run twice.
            return asked if connection.recv(1) == DO else None
        except (OSError, ValueError):  # who asked was killed, or stands still
            return None

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            self._died.recv(4096)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _leave(self) -> None:
        """Close what is the server's, in a process that is another one's from here on."""
        signal.set_wakeup_fd(-1)
        for one in (self._listener, self._died, self._told):
            one.close()
        os.close(self._node)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, sys.stdin.fileno())  # instead of the pipe of who started the server
        os.close(nothing)


def become_worker(asked: Mapping[str, Any]) -> NoReturn:
    """Be the worker that was asked for, as Ray's own script would have started it."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        sys.modules["torch"].seed()  # Python's own generator is seeded anew by itself
        gc.enable()
        *_, sys.argv = _parsed(asked["arguments"])
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _comparable(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OWN and name not in ONE_THREAD}


def _is_plain(arguments: list[str]) -> bool:
    """Whether a worker is a Python without a runtime environment that would have to come before imports."""
    language, context, _ = _parsed(arguments)
    changed = context.get("env_vars") or context.get("command_prefix") or context.get("override_worker_entrypoint")
    return language == "PYTHON" and not changed and context.get("py_executable") in (None, sys.executable)


def _parsed(arguments: list[str]) -> tuple[str, dict[str, Any], list[str]]:
    """Split what Ray gives its setup_worker.py: language, runtime environment and the worker's own arguments."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    own, rest = parser.parse_known_args(arguments)
    return own.language, json.loads(own.serialized_runtime_env_context or "{}"), rest


@contextmanager
def _no_draws() -> Iterator[None]:
    """While entered, classes that become actors are named without Ray's generator."""
    actor: Any = import_module("ray.actor")
    drawn = actor.ActorClassID

    class Named:
        @staticmethod
        def from_random() -> Any:
            return drawn(os.urandom(drawn.size()))

    actor.ActorClassID = Named
    try:
        yield
    finally:
        actor.ActorClassID = drawn


def _draw() -> bytes:
    """Return what a fork draws from Ray's generator."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, sys.modules["ray._raylet"].UniqueID.from_random().binary()[:DRAW])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as drawn:
        told = drawn.read()
    os.waitpid(child, 0)
    return told


def _import_all(names: Iterable[str]) -> None:
    for name in names:
        import_module(name)


def _die_with_parent(number: int) -> None:
    """Have this signal sent when the parent's thread ends, 0 = none (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def main(address: str, parent: int) -> None:
    """Listen, import and serve. Without a sound process to fork from, nobody is answered."""
    _die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        gc.disable()
        _import_all(WITHOUT_RAY)
        told = sys.stdin.readline()
        if not told:
            return  # who started it has ended
        environment = json.loads(told)
        node = os.pidfd_open(int(environment[RAYLET]))
        _die_with_parent(0)  # from now on this process ends with the node, in good order
        os.environ.update({**environment, **ONE_THREAD, JOB: ANY_JOB})
        with _no_draws():
            _import_all(WITH_RAY)
        gc.collect()
        gc.freeze()  # so that the collector of no worker writes to pages that all share
        if len(os.listdir("/proc/self/task")) == 1 and _draw() != _draw():
            Server(listener, node, environment).run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
