"""What the chart renders for a laptop, given to a real Ray head the way KubeRay does it: over Serve's REST API.

Of all that it says only addresses differ: pods have networks of their own, and tests keep to loopback.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from deploy.probe import PROBES, Probe, trouble
from tests.e2e.harness import App, free_port
from tests.e2e.ray_head import RayHead
from tests.helm.rendered import rendered, serve_config
from tests.helm.tools import NoTools


@pytest.fixture(scope="module")
def config():
    try:
        return serve_config(rendered("laptop"))
    except NoTools as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def app(head: RayHead, config) -> Iterator[App]:
    """The app, once it serves."""
    config["applications"][0]["args"]["host"] = "127.0.0.1"
    with head.serving(config) as app:
        yield app


@pytest.mark.timeout(300)
def test_the_app_that_the_chart_renders_answers(app: App) -> None:
    question = {"model": "demo", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 16}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=question, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert [len(replica["pids"]) for replica in app.ready()["replicas"]] == [2, 2], "each has two ranks"


def test_the_pods_probes_find_it_well(app: App, head: RayHead) -> None:
    ports = {"raylet": head.agent, "gcs": head.dashboard, "app": app.port}
    for name, probe in PROBES.items():
        assert trouble(Probe(ports[name], probe.path, probe.says), seconds=10) is None


def test_a_probe_of_a_port_without_an_app_fails(head: RayHead) -> None:
    assert trouble(Probe(free_port(), PROBES["app"].path)) is not None
