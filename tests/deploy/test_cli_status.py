"""`squadron status`: what it shows of each condition, and its exit code."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import httpx
import pytest
from rich.console import Console

from deploy.status import Condition, fetch, lines, read_report, show_status, table

ADDRESS = "http://127.0.0.1:8000"
METRICS = """\
# TYPE squadron_migrations counter
squadron_migrations_total{model_name="demo"} 3.0
# TYPE squadron_tenant_requests_queued gauge
squadron_tenant_requests_queued{model_name="demo",tenant="a"} 2.0
squadron_tenant_requests_queued{model_name="demo",tenant="b"} 1.0
"""
REASON = "a/model.safetensors: truncated or damaged: invalid header length"
READY = {
    "ready": True,
    "model": "demo",
    "version": "0.1.0",
    "app": {"name": "squadron", "status": "UNHEALTHY", "reason": ""},
    "deployments": {"Router": {"status": "HEALTHY", "counts": {"RUNNING": 2}, "reason": ""}},
    "states": [
        {"id": "aaaa1111", "state": "ready", "running": 12, "waiting": 4, "kv_usage": 0.42, "deployment": "Replica"},
        {"id": "bbbb2222", "state": "stalled", "seconds": 7.4, "running": 2, "waiting": 0, "kv_usage": 0.1},
        {"id": "cccc3333", "state": "crash-looping", "reason": REASON, "failed_starts": 6, "next_try": 13.2},
        {"id": "dddd4444", "state": "starting", "phase": "kv blocks", "seconds": 2.0},
        {"state": "pending"},
    ],
    "notice": "the last update of Replica failed",
}


def shown(body: dict, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(
        table(read_report(ADDRESS, body, METRICS))
    )
    return out.getvalue()


def test_a_terminal_of_eighty_columns_shows_every_replica_and_why_it_does_not_serve() -> None:
    text = shown(READY)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for words in ("READY", "demo", "2 routers", "14 running, 7 waiting", "3 moved", "aaaa1111", "42%"):
        assert words in text
    for words in ("stalled", "crash-looping", "6 failed starts", "kv blocks", "pending"):
        assert words in text
    flat = "".join(text.split())
    for words in ("hasnotmovedfor7s", "nexttryin13s", REASON.replace(" ", ""), "thelastupdateofReplicafailed"):
        assert words in flat


def test_without_a_terminal_each_replica_is_a_line_of_names_and_values() -> None:
    first, *replicas = lines(read_report(ADDRESS, READY, METRICS))
    assert first == (
        f"ready demo {ADDRESS} version=0.1.0 app=UNHEALTHY routers=2 running=14 waiting=4 queued=3 migrations=3 "
        'notice="the last update of Replica failed"'
    )
    assert replicas == [
        "replica aaaa1111 ready running=12 waiting=4 kv=42%",
        "replica bbbb2222 stalled seconds=7 running=2 waiting=0 kv=10%",
        f'replica cccc3333 crash-looping failed_starts=6 next_try=13s reason="{REASON}"',
        "replica dddd4444 starting phase=kv-blocks seconds=2",
        "replica - pending",
    ]


def asked(answer) -> object:
    with httpx.Client(base_url=ADDRESS, transport=httpx.MockTransport(answer)) as client:
        return fetch(client)


def answers(status: int, body: object) -> object:
    content = body if isinstance(body, str) else json.dumps(body)
    return asked(lambda request: httpx.Response(status, text=METRICS if request.url.path == "/metrics" else content))


@pytest.mark.parametrize(
    ("status", "body", "condition", "words"),
    [
        (200, READY, Condition.READY, "the last update"),
        (503, READY | {"ready": False}, Condition.NOT_READY, "the last update"),
        (503, "Path '/ready' not found", Condition.NOT_READY, "no router of the app"),
        (200, {"object": "list"}, Condition.UNREACHABLE, "no squadron server"),
        (401, {"error": {}}, Condition.KEY_REFUSED, "give --api-key or SQUADRON_API_KEY"),
    ],
)
def test_a_servers_answer_is_ready_not_ready_or_no_answer_of_ours(status, body, condition, words) -> None:
    report = answers(status, body)
    assert report.condition is condition
    assert words in report.notice
    assert lines(report)[0].split()[0] == condition.name.lower().replace("_", "-")


def test_nobody_there_is_exit_code_2_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_status("127.0.0.1:1", None, as_json=False, watch=False) == 2
    out = capsys.readouterr().out
    assert out.startswith("unreachable http://127.0.0.1:1 notice=")
    assert "--url" in out
    assert show_status("127.0.0.1:1", None, as_json=True, watch=False) == 2
    assert json.loads(capsys.readouterr().out)["condition"] == "unreachable"


def test_it_needs_no_ray() -> None:
    code = "import sys; sys.modules['ray'] = sys.modules['torch'] = None; from deploy.main import main; main()"
    command = [sys.executable, "-c", code, "status", "--url", "127.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stdout.startswith("unreachable")


def test_a_model_that_sleeps_is_not_ready_and_what_wakes_it_is_said() -> None:
    asleep = {"id": "aaaa1111", "state": "asleep", "sleep_level": 2, "running": 0, "waiting": 0, "kv_usage": 0.0}
    body = READY | {"ready": False, "asleep": ["demo"], "states": [asleep]}
    del body["notice"]
    text = shown(body)
    for words in ("NOT READY", "asleep", "at level 2", "/wake_up"):
        assert words in text
    first, replica = lines(read_report(ADDRESS, body, METRICS))
    assert "asleep: demo" in first
    assert "asleep" in replica.split()
    assert "sleep_level=2" in replica
