"""A process that has imported what Ray's workers need, and forks each of them, instead of a start from nothing.

Ray starts a Python for every worker, which imports Ray twice, Serve and torch: three seconds of a core, of which two
are spent before anything of ours runs. A fork takes some hundredths. It is for a Ray of our own on one machine.

Nobody depends on it: where it does not answer, or a worker wants an environment of its own, Ray starts the worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from cluster.replica.orphans import RAYLET
from deploy.serve.forked_workers import ONE_THREAD
from deploy.serve.worker_shim import ADDRESS, RAYS_OWN

SHIM = Path(__file__).with_name("worker_shim.py")
SOCKET = "forks"
CUDA = Path("/dev/nvidiactl")
START_RAYLET = "start_raylet"  # a method of Ray's node


class ForkServer:
    """The process, and the folder of its socket. Made in the main thread: it ends with the thread that started it.

    It ends as well with the Ray node whose workers it forks. `close` can be called twice. pid: its process id.
    folder: of its socket.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="squadron-")  # nobody else may enter it
        self.folder = self._folder.name
        self._address = str(Path(self.folder, SOCKET))
        command = [sys.executable, "-m", "deploy.serve.forked_workers", self._address, str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for the command. A session would have a share of the CPUs to itself
        )

        self.pid = self._process.pid

    @contextmanager
    def forks(self) -> Iterator[None]:
        """While entered, a Ray node that this process starts has its workers forked."""
        # Not with this file: the server starts before its command imports Ray.
        node_class = import_module("ray._private.node").Node
        before: Callable[..., Any] | None = getattr(node_class, START_RAYLET, None)
        if before is None:  # another Ray: it starts its workers itself
            yield
            return

        def start_raylet(node: Any, *args: Any, **more: Any) -> Any:
            parameters = node._ray_params
            told = {ADDRESS: self._address, RAYS_OWN: parameters.setup_worker_path}
            os.environ.update(told)
            try:
                parameters.setup_worker_path = str(SHIM)
                started = before(node, *args, **more)
                self._tell(node.all_processes["raylet"][0].process.pid)
                return started
            finally:
                for name in told:
                    del os.environ[name]

        setattr(node_class, START_RAYLET, start_raylet)
        try:
            yield
        finally:
            setattr(node_class, START_RAYLET, before)

    def _tell(self, raylet: int) -> None:
        """Tell the process id of Ray's node, and the environment that its workers come to have."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it was killed: Ray starts its workers itself
                self._process.stdin.write(json.dumps({RAYLET: str(raylet), **os.environ}) + "\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """End it. Workers that it forked go on."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


def fork_server() -> ForkServer | None:
    """Start one; None where there are no pidfds (Linux has them), or an NVIDIA GPU: CUDA does not survive a fork."""
    return ForkServer() if hasattr(os, "pidfd_open") and not CUDA.exists() else None
