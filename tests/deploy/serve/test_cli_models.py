"""What `squadron serve` says where it serves several models."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

import deploy.serve.readiness
import deploy.serve.served_app
from cluster.app_config import AppConfig, parse_app
from cluster.errors import ReplicaStartError, find_start_failure
from deploy.cli.processes import Interrupts
from deploy.serve.command import Options, Server
from deploy.serve.readiness import Readiness, StartError, refuse_failed
from deploy.serve.replica_log import Listed, ReplicaLog
from engine.errors import ConfigError

BODIES = [
    {"id": "a", "model": "demo", "pids": [1], "phases": {"weights": 1.0}, "kv_tokens": 100, "engine": "X"},
    {"id": "b", "model": "other", "pids": [2, 3], "phases": {"weights": 2.0}, "kv_tokens": 200, "engine": "X"},
    {"id": "c", "model": "other", "pids": [4, 5], "phases": {"weights": 3.0}, "kv_tokens": 200, "engine": "X"},
]


def app(*names: str) -> AppConfig:
    models = [{"model": "demo", "served_model_name": [name, f"{name}-alias"]} for name in names]
    models[-1] |= {"replicas": 2, "tensor_parallel_size": 2} if len(names) > 1 else {}
    return parse_app({"models": models, "port": 77})


def test_each_model_has_its_phases_and_is_named_in_what_can_be_pasted(capsys):
    server = Server(app("demo", "other"), Options(), Interrupts())
    server._replicas = BODIES
    server._print_phases(10.0)
    server.announce()
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    first = lines.index("Model demo")
    assert lines[first + 1 : first + 3] == ["Placement 9.0 s 1 replica x 1 rank", "Weights 1.0 s X"]
    second = lines.index("Model other")
    assert lines[second + 1 : second + 3] == ["Placement 7.0 s 2 replicas x 2 ranks", "Weights 3.0 s X"]
    assert "http://127.0.0.1:77/v1 models demo, other" in " ".join(lines)
    assert '"model": "demo"' in text
    assert "`squadron chat --url http://127.0.0.1:77 --model demo`" in text


def test_one_model_is_told_as_ever(capsys):
    server = Server(app("demo"), Options(), Interrupts())
    server._replicas = BODIES[:1]
    server._print_phases(10.0)
    server.announce()
    text = capsys.readouterr().out
    assert "Model demo" not in text
    assert "model demo\n" in text
    assert "--model" not in text


def test_the_start_waits_for_all_replicas_of_each_model(monkeypatch):
    status = ApplicationStatusOverview(
        status=ApplicationStatus.RUNNING, message="", last_deployed_time_s=0.0, deployments={}
    )
    listed = [BODIES[:1], [BODIES[0], BODIES[0] | {"id": "d"}, BODIES[1]], BODIES]
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        body = {"ready": True, "deployed": "ours", "replicas": listed[min(len(asked), len(listed)) - 1]}
        return httpx.Response(200, json=body | {"states": [{"id": len(asked)}]})

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(deploy.serve.readiness, "client_for", lambda *_: client)
    monkeypatch.setattr(deploy.serve.readiness, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(
        deploy.serve.readiness, "serve", SimpleNamespace(status=lambda: SimpleNamespace(applications={"app": status}))
    )
    shown: list[Sequence[Any]] = []
    wanted = {"demo": 1, "other": 2}
    assert Readiness("app", "http://server", None, "ours", wanted, print, shown.append, 60.0).wait() == BODIES
    assert len(asked) == 3
    assert shown == [[{"id": 1}], [{"id": 2}], [{"id": 3}]]
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    with pytest.raises(StartError, match="another server answers at http://server; give another --port"):
        Readiness("app", "http://server", None, "of another start", wanted, print, shown.append, 60.0).wait()


def test_a_start_of_which_nothing_moves_any_more_is_given_up(monkeypatch):
    status = ApplicationStatusOverview(
        status=ApplicationStatus.DEPLOYING, message="", last_deployed_time_s=0.0, deployments={}
    )
    answers = iter(range(10))

    def answer(_: httpx.Request) -> httpx.Response:
        moves = min(next(answers), 5)
        states = [{"id": "a", "phase": "weights", "share": moves / 10, "seconds": 9}]
        return httpx.Response(503, json={"ready": False, "states": states})

    clock = iter(range(1000))
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(deploy.serve.readiness, "client_for", lambda *_: client)
    times = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(deploy.serve.readiness, "time", times)
    found = SimpleNamespace(status=lambda: SimpleNamespace(applications={"app": status}))
    monkeypatch.setattr(deploy.serve.readiness, "serve", found)
    with pytest.raises(StartError, match="nothing has moved for 6 s: the app is DEPLOYING"):
        Readiness("app", "http://server", None, "ours", {"demo": 1}, print, lambda _: None, 6.0).wait()
    assert next(answers) > 6, "it was waited for as long as something moved"


def test_a_lost_replica_is_told_with_its_model_and_those_of_others_are_not_counted():
    lines: list[str] = []
    log = ReplicaLog(BODIES, 2, lines.append, 120.0, "other")
    for _ in range(3):
        log.update(Listed(BODIES[:2]))
    assert lines == [
        "Replica c of other (pids 4, 5) is lost; what it ran goes on elsewhere, 1 of 2 left. Ray starts another."
    ]


def test_one_look_asks_once_for_all_models(monkeypatch, capsys):
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={"replicas": BODIES[:2]})

    def end() -> None:
        raise StartError("deleted")

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(deploy.serve.served_app, "client_for", lambda *_: client)
    monkeypatch.setattr(deploy.serve.served_app, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(deploy.serve.served_app, "serve", SimpleNamespace(status=end))
    server = Server(app("demo", "other"), Options(), Interrupts())
    server._replicas = BODIES
    with pytest.raises(StartError, match="deleted"):
        server.watch()
    assert asked == ["/ready"] * deploy.serve.served_app.POLLS_PER_STATUS
    assert capsys.readouterr().out.startswith("Replica c of other (pids 4, 5) is lost")


def test_a_model_that_cannot_start_is_named():
    error = ReplicaStartError.of(
        ConfigError("the KV cache holds 2 tokens; raise num_kv_blocks", "num_kv_blocks"), "b"
    )
    message = f"Traceback ...\ncluster.start_error.ReplicaStartError: {error}\n"
    found = find_start_failure(message)
    assert found is not None
    assert (found.flag, found.message) == (
        "num_kv_blocks",
        "model b: the KV cache holds 2 tokens; raise num_kv_blocks",
    )
    status = ApplicationStatusOverview(
        status=ApplicationStatus.DEPLOYING, message=message, last_deployed_time_s=0.0, deployments={}
    )
    with pytest.raises(StartError, match=r"^model b: the KV cache holds 2 tokens"):
        refuse_failed(status)
