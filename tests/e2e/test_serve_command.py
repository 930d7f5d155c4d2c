"""`squadron serve demo` as a person runs it: a process of its own, its printed lines, Ctrl-C, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from deploy.serve.environment import on_loopback, running_rays
from tests.chaos.batch import write_rows
from tests.e2e.command import START_SECONDS, Command, url_of, wait_gone
from tests.e2e.harness import answers

pytestmark = pytest.mark.timeout(420)  # a server starts, on a machine that others may use as well


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Command]:
    """The demo model as one replica of two ranks, on a port of its own choosing."""
    command = Command(
        *("serve", "demo", "-tp", "2", "--port", "0", "--kv-cache-memory-bytes", str(64 * 2**20)),
        *("--device", "cpu", "--served-model-name", "shown", "--grpc-port", "0"),
        home=home,
    )
    try:
        command.wait_for("Ctrl-C stops it")
        yield command
    finally:
        command.kill()


def test_each_phase_has_a_line_with_its_seconds(served: Command) -> None:
    for phase in ("Ray", "Serve", "Placement", "Weights", "KV blocks", "Warm-up", "Ready"):
        assert re.search(rf"^{phase} +\d+\.\d s", served.text, re.MULTILINE), served.text
    assert re.search(r"^KV blocks .* [\d,]+ tokens fit", served.text, re.MULTILINE)
    assert "model shown" in served.text


def test_the_printed_curl_can_be_pasted(served: Command) -> None:
    curl = served.text[served.text.index("curl -N") :].split("\n\n")[0]
    address = re.search(r"http://\S+", curl)[0]
    body = re.search(r"-d '(.*)'", curl)[1]
    headers = dict([re.search(r"-H '([^']*)'", curl)[1].split(": ")])
    answer = httpx.post(address, content=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert answer.text.count("data: {") > 5


def test_the_printed_page_is_there(served: Command) -> None:
    page = re.search(r"^Page: (http://127\.0\.0\.1:\d+/ui)$", served.text, re.MULTILINE)[1]
    assert "<title>Squadron</title>" in httpx.get(page, timeout=10).text
    assert f"squadron chat --url {page.removesuffix('/ui')}`" in served.text


def test_the_printed_grpc_address_answers(served: Command) -> None:
    address = re.search(r"^gRPC: (127\.0\.0\.1:\d+), service squadron\.v1\.Inference$", served.text, re.MULTILINE)[1]
    with grpc.insecure_channel(address) as channel:
        stub = InferenceStub(channel)
        assert stub.Health(pb.HealthRequest(), timeout=10).ready
        assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10).model == "shown"


def test_chat_from_a_pipe_talks_to_it(served: Command) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from deploy.main import main; main()", "chat", "--url", url_of(served)],
        input="What does os.path.join do?\n/exit\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"\d+ tokens, \d+ tokens/s", result.stdout), result.stdout


def test_a_batch_joins_the_ray_that_it_started_for_itself(served: Command, home: Path, tmp_path: Path) -> None:
    (address,) = {one for one in running_rays() if on_loopback(one)} & set(_ray_addresses(served))
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "import os"}, {"prompt": "def f"}])
    files = (str(tmp_path / "rows.jsonl"), str(tmp_path / "answers.jsonl"))
    # Not BatchProcess, which imports Ray first.
    batch = Command("batch", *files, "--app", "squadron", home=home, RAY_ADDRESS=address)
    assert batch.wait() == 0, batch.text
    assert "rows      2" in batch.text
    assert "Started <" not in batch.text
    wrong = Command("batch", *files, "--app", "nope", home=home, RAY_ADDRESS=address)
    assert wrong.wait() == 1
    assert "--app: there is no app 'nope' in this cluster; running: squadron" in wrong.text
    assert "Traceback" not in wrong.text
    batch.kill()
    wrong.kill()


def _ray_addresses(served: Command) -> list[str]:
    """Where the control store of its Ray listens, which is not told to others."""
    told = answers(served.descendants(), psutil.Process.name)
    (store,) = [process for process, name in told if name == "gcs_server"]
    listening = [one.laddr for one in store.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return [f"127.0.0.1:{laddr.port}" for laddr in listening]


def test_only_loopback_is_listened_on_but_for_serves_own_guarded_port(served: Command) -> None:
    """Serve binds one port of each replica to all interfaces, for which it demands Ray's token (FAULTS)."""
    open_to_all: dict[int, int] = {}
    told = answers(served.descendants(), lambda one: (" ".join(one.cmdline()), one.net_connections("tcp")))
    for process, (words, connections) in told:
        for connection in connections:
            address = connection.laddr.ip if connection.status == psutil.CONN_LISTEN else "127.0.0.1"
            if not address.removeprefix("::ffff:").startswith("127."):
                open_to_all[process.pid] = open_to_all.get(process.pid, 0) + 1
                assert "ServeReplica" in words, f"{words} listens on {address}"
    assert all(ports == 1 for ports in open_to_all.values()), open_to_all


def test_ray_runs_nothing_that_nobody_uses(served: Command) -> None:
    """Each would take most of a second of a core at every start."""
    idle = ("autoscaler/_private/monitor.py", "dashboard/dashboard.py", "log_monitor.py")
    for process, words in answers(served.descendants(), psutil.Process.cmdline):
        assert not any(one in word for word in words[:4] for one in idle), (process, words)


def test_its_processes_get_no_smaller_share_of_a_busy_machine_than_others(served: Command) -> None:
    told = answers(served.descendants(), lambda one: (one.name(), one.nice()))
    workers = [niceness for _, (name, niceness) in told if name.startswith("ray::")]
    assert len(workers) > 4
    assert set(workers) == {psutil.Process().nice()}


def test_a_killed_replica_and_the_next_one_are_a_line_each(served: Command) -> None:
    (replica,) = httpx.get(f"{url_of(served)}/ready", timeout=5).json()["replicas"]
    os.kill(replica["pids"][-1], signal.SIGKILL)
    served.wait_for("is ready: 1 of 1.")
    assert re.search(rf"^Replica {replica['id']} \(pids \d+, \d+\) is lost; .*$", served.text, re.MULTILINE), (
        served.text
    )
    assert "(raylet)" not in served.text


def test_ctrl_c_leaves_no_process_behind(served: Command) -> None:
    """The last test of this file: it ends what the others use."""
    started = served.descendants()
    assert len(started) > 5
    url = url_of(served)
    assert served.ctrl_c() == 0
    assert "Stopping" in served.text
    assert "Traceback" not in served.text
    wait_gone(started)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=5)


def test_a_supervisors_sigterm_to_all_processes_ends_all_of_them_soon(home: Path) -> None:
    """Ray's own processes get it too, so that nobody is left who could delete the app in good order."""
    command = Command(
        *("serve", "demo", "--port", "0", "--device", "cpu", "--kv-cache-memory-bytes", str(64 * 2**20)), home=home
    )
    try:
        command.wait_for("Ctrl-C stops it")
        started = command.descendants()
        os.killpg(command.process.pid, signal.SIGTERM)
        command.wait()
        wait_gone(started)
    finally:
        command.kill()


def test_a_flag_that_does_not_fit_the_model_is_one_sentence_though_ray_starts_meanwhile(home: Path) -> None:
    command = Command("serve", "demo", "--port", "0", "--device", "cpu", "-tp", "3", home=home)
    try:
        assert command.wait(START_SECONDS) == 1
    finally:
        command.kill()
    (line,) = command.lines
    assert line.startswith("Error: ")
    assert "--tensor-parallel-size" in line


def test_a_start_that_does_not_fit_is_one_sentence_and_leaves_nothing(home: Path) -> None:
    command = Command(
        *("serve", "demo", "--port", "0", "--device", "cpu"),
        *("--kv-cache-memory-bytes", "4096", "--max-model-len", "2000"),
        home=home,
    )
    try:
        assert command.wait(START_SECONDS) == 1
    finally:
        command.kill()
    last = command.lines[-1]
    assert last.startswith("Error: the KV cache holds")
    assert "--kv-cache-memory-bytes" in last
    assert "Traceback" not in command.text
