"""Which Ray RAY_ADDRESS means, and what becomes of a command that waits for one."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext

import psutil
import pytest

from deploy.cli.processes import Interrupts
from deploy.serve import environment as rays
from deploy.serve import ray_cluster
from deploy.serve.environment import LOCAL_RAY, prepare_ray
from deploy.serve.ray_cluster import LocalRay, RayStartError
from engine.errors import ConfigError


@pytest.fixture
def listening():
    """Opens ports; each call returns one that is open on `host`."""
    opened = []

    def listen(host):
        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        opened.append(server)
        return server.getsockname()[1]

    yield listen
    for server in opened:
        server.close()


@pytest.mark.parametrize(("host", "private"), [("127.0.0.1", True), ("", False)])
def test_a_ray_is_private_where_its_port_is_open_on_loopback_alone(listening, host, private):
    port = listening(host)
    for name in ("127.0.0.1", "localhost"):
        assert rays.private_ray(f"{name}:{port}") == (f"{name}:{port}" if private else None)
    assert rays.private_ray(f"192.0.2.1:{port}") is None
    assert rays.private_ray(f"ray://127.0.0.1:{port}") is None


def test_a_port_that_is_closed_is_no_private_ray():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert rays.private_ray(f"127.0.0.1:{closed.getsockname()[1]}") is None


def test_auto_means_the_only_ray_of_this_machine(listening, monkeypatch):
    first, second = (f"127.0.0.1:{listening('127.0.0.1')}" for _ in range(2))
    shared = f"127.0.0.1:{listening('')}"
    for running, meant in (([first], first), ([shared], None), ([first, shared], None), ([], None)):
        monkeypatch.setattr(rays, "running_rays", lambda running=running: running)
        assert rays.private_ray("auto") == meant
    monkeypatch.setattr(rays, "running_rays", lambda: [first, second])
    with pytest.raises(ConfigError, match=f"any of {first}, {second}, which run here; set it to one of them"):
        rays.private_ray("auto")


def test_a_private_ray_is_joined_as_it_was_started(listening, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    shared, private = (f"127.0.0.1:{listening(host)}" for host in ("", "127.0.0.1"))
    assert prepare_ray(shared) == shared
    assert "RAY_AUTH_MODE" not in os.environ
    assert prepare_ray(private) == private
    assert os.environ.items() >= LOCAL_RAY.items()


@pytest.fixture
def run():
    """Runs Python code in a process of its own."""
    started = []

    def start(code):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_that_waits_for_ray(run, number):
    """Something listens and never answers: Ray waits for it in C++, where Python's handlers do not run."""
    with socket.create_server(("", 0)) as mute:
        mute.settimeout(60)
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        process = run(
            "from deploy.cli.processes import Interrupts\n"
            "from deploy.serve.ray_cluster import JoinedRay\n"
            f"with Interrupts() as interrupts: JoinedRay({address!r}, False, interrupts)"
        )
        knock, _ = mute.accept()
        joining, _ = mute.accept()
        process.send_signal(number)
        assert process.wait(30) in (128 + number, -signal.SIGKILL)
        knock.close()
        joining.close()


@pytest.mark.parametrize(
    ("cpus", "told"), [(1.0, "this machine of 2 cores"), (6.5, "2 cores, of which Ray makes 7 ")]
)
def test_a_ray_of_our_own_tells_the_machines_cores_from_what_it_hands_out(monkeypatch, cpus, told):
    monkeypatch.setattr(ray_cluster, "cores", lambda: 2)
    monkeypatch.setattr(LocalRay, "_start", lambda *given: None)
    with Interrupts() as interrupts:
        about = LocalRay(cpus, verbose=False, interrupts=interrupts).about
    assert told in about
    assert ("Ray" in about) == (cpus > 2)


def test_a_process_that_ends_while_it_is_asked_about_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Idle workers of Ray end at any time; a command that stops asks five times a second whether Ray is there."""

    class Child:
        def __init__(self, name: str) -> None:
            self._name = name

        def name(self) -> str:
            return self._name

        def status(self) -> str:
            if self._name == "gone":
                raise psutil.NoSuchProcess(1)
            return str(psutil.STATUS_RUNNING)

    monkeypatch.setattr(psutil.Process, "children", lambda _: [Child(name) for name in children])
    cluster = LocalRay.__new__(LocalRay)
    children = ["gone", "gcs_server", "raylet"]
    assert cluster.alive()
    children = ["gone", "gcs_server"]
    assert not cluster.alive()


@pytest.mark.parametrize("times", [1, 2])
def test_a_ray_that_does_not_start_is_tried_once_more_and_told_in_one_sentence(monkeypatch, capsys, times):
    tried = []

    def start(**_):
        tried.append(1)
        if len(tried) <= times:
            raise Exception("\nThe current node timed out during startup.\nMore of it.")

    monkeypatch.setattr(ray_cluster.ray, "init", start)
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: None)
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    told = (
        "Ray did not start: The current node timed out during startup. (its logs have more: raylet.err and "
        "gcs_server.err in /elsewhere/ray/session_latest/logs)"
    )
    refused = pytest.raises(RayStartError, match=f"^{re.escape(told)}$") if times == 2 else nullcontext()
    with Interrupts() as interrupts, refused:
        monkeypatch.setattr(interrupts, "started", list)
        LocalRay(1.0, verbose=False, interrupts=interrupts)
    assert len(tried) == 2
    assert capsys.readouterr().err == (
        "Ray did not start, and is tried once more: The current node timed out during startup.\n"
    )
