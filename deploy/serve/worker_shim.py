"""What Ray's node runs for each worker that it wants: asks the fork server for one, or starts one as Ray would.

    python worker_shim.py ...as Ray's own setup_worker.py

Run by its path, and imports next to nothing: it stands before every worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys

ADDRESS = "SQUADRON_FORK_SERVER"  # environment variable: the fork server's socket
RAYS_OWN = "SQUADRON_SETUP_WORKER"  # environment variable: the script of Ray's that this one stands for
RAYLET = "RAY_RAYLET_PID"  # environment variable of Ray's workers
# Read by OpenMP, OpenBLAS and Arrow's allocator as they are loaded. No thread survives a fork, so the fork server has
# but one. A worker has values of its own; a rank sets its own number of threads.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


def forked() -> bool:
    """Whether the fork server has started the worker."""
    asked = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[ADDRESS])
            connection.sendall(json.dumps(asked).encode())
            connection.shutdown(socket.SHUT_WR)
            return bool(connection.recv(1))
    except OSError:  # it has ended, or was killed
        return False


if __name__ == "__main__" and not forked():
    os.execv(sys.executable, [sys.executable, os.environ[RAYS_OWN], *sys.argv[1:]])  # noqa: S606 - as Ray starts it
