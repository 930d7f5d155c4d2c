"""One streamed request on a real app: one trace over all its processes, and log lines with the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import ray

from tests.e2e.harness import App, eventually

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TREE = ("POST /v1/chat/completions", ("chat demo", ("attempt", ("queue",), ("prefill",), ("decode",))))


def spans_of(app: App, trace_id: str) -> list[dict[str, Any]]:
    """The spans of a trace that are in the file so far."""
    assert app.traces is not None
    spans = [json.loads(line) for line in app.traces.read_text().splitlines()]
    return [span for span in spans if span["context"]["trace_id"] == f"0x{trace_id}"]


def tree(spans: list[dict[str, Any]], span: dict[str, Any]) -> tuple[Any, ...]:
    """A span's name, and the trees below it in order of time."""
    below = [one for one in spans if one["parent_id"] == span["context"]["span_id"]]
    return span["name"], *[tree(spans, one) for one in sorted(below, key=lambda one: one["start_time"])]


def log_lines(name: str) -> list[dict[str, Any]]:
    """The JSON lines of our own loggers in the log files of that name, of all processes of this Ray."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = [path.read_text(errors="replace") for path in folder.rglob(name)]
    found = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith('{"ts": ')]
    return [one for one in found if one["logger"].startswith(("cluster", "engine", "parallel"))]


def stream(app: App, **headers: str) -> httpx.Response:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 16, "ignore_eos": True, "stream": True}
    return httpx.post(f"{app.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_streamed_request_is_one_trace_over_ingress_router_and_replica(demo_app: App) -> None:
    answer = stream(demo_app, traceparent=f"00-{TRACE}-{CALLER}-01", **{"x-request-id": "traced-1"})
    assert answer.status_code == 200
    assert answer.headers["traceresponse"].startswith(f"00-{TRACE}-")
    spans = eventually(lambda: len(found := spans_of(demo_app, TRACE)) == 6 and found, "all spans are in the file")
    (root,) = [span for span in spans if span["parent_id"] == f"0x{CALLER}"]
    assert tree(spans, root) == TREE
    roles = {span["name"]: span["resource"]["attributes"]["squadron.role"] for span in spans}
    assert (roles["chat demo"], roles["decode"]) == ("router", "replica")
    request_id = json.loads(answer.text.split("data: ")[1])["id"]
    named = {span["name"]: span["attributes"] for span in spans}
    assert named["chat demo"]["gen_ai.response.id"] == request_id
    assert named["chat demo"]["gen_ai.usage.output_tokens"] == 16
    assert named["attempt"]["squadron.replica.id"] in [one["id"] for one in demo_app.ready()["replicas"]]

    def told() -> list[dict[str, Any]]:
        return [line for line in log_lines("replica_*Router*.log") if line.get("request_id") == request_id]

    (line,) = eventually(told, "the router's log has the request")
    assert line["router"] and line["model"] == "demo"
    assert "os.path.join" not in json.dumps(line)


def test_lines_of_replicas_and_ranks_say_which_they_are(demo_app: App) -> None:
    ids = {one["id"] for one in demo_app.ready()["replicas"]}
    drivers = {(line.get("replica"), line.get("rank")) for line in log_lines("replica_*Replica*.log")}
    assert {(name, 0) for name in ids} <= drivers
    others = {(line.get("replica"), line.get("rank")) for line in log_lines("worker-*.err")}
    assert {(name, 1) for name in ids} <= others
