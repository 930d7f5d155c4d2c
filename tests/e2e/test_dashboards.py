"""Every figure that dashboards and alerts ask for has samples at Ray's agent once an app has been under load."""

from __future__ import annotations

import json
from contextlib import suppress

import httpx

from cluster.admission.deadline import HEADER
from deploy.chart.files import DASHBOARDS
from deploy.observability.alerts import alerts
from deploy.top.picture import NAMES
from tests.e2e.agent import SECONDS, ask_over_grpc, metrics_at_the_agent
from tests.e2e.command import Command
from tests.e2e.harness import App, eventually
from tests.promql import named

LONG = {"model": "demo", "prompt": "def f():\n", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


def asked() -> set[str]:
    """The metrics of all queries."""
    queries = [query.expr for board in DASHBOARDS.values() for panel in board.panels() for query in panel.queries]
    return {one.metric for expr in [*queries, *(alert.expr for alert in alerts())] for one in named(expr)}


def load(app: App) -> None:
    """Answers of all kinds: whole, late, given up, refused."""
    short = LONG | {"max_tokens": 40, "n": 2}
    for _ in range(4):
        assert httpx.post(f"{app.url}/v1/completions", json=short, timeout=60).status_code == 200
    late = httpx.post(f"{app.url}/v1/completions", json=LONG, headers={HEADER: "1.5"}, timeout=30)
    assert late.status_code == 504
    assert httpx.post(f"{app.url}/v1/completions", json=LONG | {"model": "none"}, timeout=30).status_code == 404
    with httpx.stream("POST", f"{app.url}/v1/completions", json=LONG | {"stream": True}, timeout=30) as response:
        next(response.iter_lines())


def test_every_figure_of_dashboards_and_alerts_has_samples(demo_app: App) -> None:
    load(demo_app)
    ask_over_grpc(demo_app)
    wanted = asked()
    assert len(wanted) > 50
    missing: set[str] = wanted

    def none_is_missing() -> bool:
        nonlocal missing
        missing = wanted - metrics_at_the_agent()
        return not missing

    with suppress(AssertionError):
        eventually(none_is_missing, f"samples of all of {len(wanted)} metrics", SECONDS)
    assert missing == set()


def test_top_reads_a_live_app(demo_app: App, tmp_path) -> None:
    command = Command("top", "--url", demo_app.url, "--once", "--json", "--interval", "3", home=tmp_path)
    try:
        while command.process.poll() is None:
            load(demo_app)
        assert command.wait() == 0
    finally:
        command.kill()
    picture = json.loads(command.text)
    (model,) = picture["models"]
    assert picture["heard"] == 1
    assert model["model"] == "demo"
    assert model["generation_tokens"] > 0
    assert {replica["line"]["state"] for replica in picture["replicas"]} == {"ready"}
    shown = httpx.get(f"{demo_app.url}/metrics", timeout=10).text
    assert [name for name in NAMES if f"squadron_{name}{{" not in shown] == []
