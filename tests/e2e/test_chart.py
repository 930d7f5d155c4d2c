"""What the chart renders for a laptop, given to a real Ray head the way KubeRay does it: over Serve's REST API.

Of all that it says only addresses differ: pods have networks of their own, and tests keep to loopback.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deploy.probe import PROBES, Probe, trouble
from tests.e2e.harness import App, eventually, free_port
from tests.e2e.ray_head import RayHead
from tests.helm.rendered import EXAMPLES, Helm, serve_config
from tests.helm.tools import NoTools


def rendered_config(*given: str) -> dict[str, Any]:
    """Return the Serve config for a laptop, on loopback, with more values as of `--set`."""
    try:
        config = serve_config(
            Helm("4").template(EXAMPLES["laptop"], *(word for one in given for word in ("--set", one)))
        )
    except NoTools as error:
        pytest.skip(str(error))
    config["applications"][0]["args"]["host"] = "127.0.0.1"
    return config


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return rendered_config()


@pytest.fixture(scope="module")
def app(head: RayHead, config) -> Iterator[App]:
    """The app, once it serves."""
    with head.serving(config) as app:
        yield app


@pytest.mark.timeout(300)
def test_the_app_that_the_chart_renders_answers(app: App) -> None:
    question = {"model": "demo", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 16}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=question, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert [len(replica["pids"]) for replica in app.ready()["replicas"]] == [2, 2], "each has two ranks"


def pids(app: App) -> set[int]:
    return {pid for replica in app.ready()["replicas"] for pid in replica["pids"]}


@pytest.mark.timeout(300)
def test_other_numbers_start_and_stop_copies_and_restart_none(
    app: App, head: RayHead, config: dict[str, Any]
) -> None:
    replicas, router = pids(app), head.routers()
    head.apply(rendered_config("models[0].replicas=3,app.routers=2"), app.port)
    eventually(
        lambda: len(app.ready()["replicas"]) == 3 and len(head.routers()) == 2, "three replicas, two routers", 150
    )
    assert replicas < pids(app)
    assert router < head.routers()
    head.apply(config, app.port)
    eventually(
        lambda: len(app.ready()["replicas"]) == 2 and len(head.routers()) == 1, "two replicas, one router", 150
    )


def test_the_pods_probes_find_it_well(app: App, head: RayHead) -> None:
    ports = {"raylet": head.agent, "gcs": head.dashboard, "app": app.port}
    for name, probe in PROBES.items():
        assert trouble(Probe(ports[name], probe.path, probe.says), seconds=10) is None


def test_a_probe_of_a_port_without_an_app_fails(head: RayHead) -> None:
    assert trouble(Probe(free_port(), PROBES["app"].path)) is not None


@pytest.mark.timeout(300)
def test_other_bounds_of_autoscaling_restart_no_replica_nor_router_apart(head: RayHead) -> None:
    """With those of the chart a policy runs in Serve's controller that was named in the config."""
    scaled = "autoscaling.enabled=true,models[0].max_replicas=2,workerGroups[1].name=front,routers.workerGroup=front"
    with head.serving(rendered_config(f"{scaled},models[0].replicas=2,models[0].downscale_delay_s=3600")) as app:
        before, router = pids(app), head.routers()
        more = "models[0].replicas=3,models[0].min_replicas=3,models[0].downscale_delay_s=3600"
        head.apply(rendered_config(f"{scaled},models[0].max_replicas=4,{more}"), app.port)
        eventually(lambda: len(app.ready()["replicas"]) == 3, "a third replica", 90)
        assert before < pids(app)
        assert head.routers() == router
