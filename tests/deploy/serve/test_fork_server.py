"""The fork server without a Ray: who is forked, who is not, and what stands in for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deploy.serve import fork_server as forks
from deploy.serve.worker_shim import ADDRESS, DO, RAYS_OWN, WILL

SHIM = Path("deploy/serve/worker_shim.py")
ARGUMENTS = ["default_worker.py", "--language=PYTHON"]


def shim(tmp_path: Path, address: Path) -> subprocess.CompletedProcess[str]:
    """Run it as Ray's node does, where Ray's own script says what it was given."""
    rays = tmp_path / "setup_worker.py"
    rays.write_text("import sys; print(sys.argv[1:])")
    environment = os.environ | {ADDRESS: str(address), RAYS_OWN: str(rays)}
    return subprocess.run([sys.executable, SHIM, *ARGUMENTS], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("says", "starts"), [(WILL, False), (b"", True)], ids=["it forks", "it refuses"])
def test_a_worker_is_started_once_by_the_server_or_by_rays_own_script(tmp_path: Path, says: bytes, starts: bool):
    heard = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "forks"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as told:
                heard.append(json.loads(told.readline())["arguments"])
                connection.sendall(says)
                heard.append(connection.recv(1) if says else b"")

        server = threading.Thread(target=serve)
        server.start()
        done = shim(tmp_path, tmp_path / "forks")
        server.join()
    assert heard == [ARGUMENTS, b"" if starts else DO]
    assert (done.stdout.strip(), done.stderr) == (str(ARGUMENTS) if starts else "", "")


def test_where_nobody_answers_rays_own_script_starts_the_worker(tmp_path: Path) -> None:
    done = shim(tmp_path, tmp_path / "nobody")
    assert (done.stdout.strip(), done.stderr) == (str(ARGUMENTS), "")


def test_nothing_is_forked_where_there_is_an_nvidia_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "CUDA", tmp_path)
    assert forks.fork_server() is None
