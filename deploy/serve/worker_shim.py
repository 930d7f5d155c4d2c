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
PATIENCE = 30.0  # seconds; a fork server that has not answered by then stands still, or imports on a busy machine
WILL, DO = b"?", b"!"  # the server would fork; whoever asked is still there, and leaves it to the server


def forked() -> bool:
    """Whether the fork server starts the worker."""
    asked = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(os.environ[ADDRESS])
            connection.sendall(json.dumps(asked).encode() + b"\n")
            if connection.recv(1) != WILL:
                return False
            connection.sendall(DO)
            return True
    except OSError:  # it has ended, was killed, or stands still
        return False


if __name__ == "__main__" and not forked():
    os.execv(sys.executable, [sys.executable, os.environ[RAYS_OWN], *sys.argv[1:]])  # noqa: S606 - as Ray starts it
