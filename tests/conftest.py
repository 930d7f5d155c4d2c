"""Fixtures shared by the folders that need a cluster. Ray is imported only by the tests that use them."""

from __future__ import annotations

import os
import re
import signal
import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.lifetime import end_in_good_order

# Triton decides when a kernel is defined whether its interpreter runs it, so this precedes every import of ours.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

if TYPE_CHECKING:
    from tests.e2e.harness import App

# A shell that runs the tests in the background has them ignore Ctrl-C, which the tests of Ctrl-C would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

end_in_good_order()

# Nothing here speaks TLS, and every client of httpx would read all certificates anew: 25 ms of a core each time.
ssl.create_default_context = cache(ssl.create_default_context)

# A busy machine must not fail a property: examples have no deadline of their own, tests have pytest's.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("squadron", PATIENT)
settings.register_profile("long", PATIENT, max_examples=500)
settings.load_profile("squadron")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the shared Ray first: side by side with others they are what takes longest.

    Of these, those that have an app of their own come before the shared app, which never rests once it is there.
    """
    order = ({"serve_port"}, {"serve_port", "demo_app"}, set())
    items.sort(key=lambda item: order.index({"serve_port", "demo_app"} & set(getattr(item, "fixturenames", ()))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have `--dist loadfile` keep the files together that share a Ray or a GPU, as well as the tests of a file."""
    from xdist.scheduler import LoadFileScheduling

    class BySharedRay(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return shared_by(config.rootpath / file) or file

    return BySharedRay(config, log) if config.getvalue("dist") == "loadfile" else None


@cache
def shared_by(file: Path) -> str:
    """Return what the tests of a file share with those of other files, "" for nothing."""
    if file.parent.name == "gpu":
        return "gpu"
    text = file.read_text(encoding="utf-8") if file.parent.name in ("chaos", "e2e") else ""
    return next((name for name, fixture in SHARED.items() if fixture.search(text)), "")


# By the arguments of tests and fixtures.
SHARED = {
    "ray": re.compile(r"def \w+\([^)]*\b(serve_port|demo_app)\b"),
    "head": re.compile(r"def \w+\([^)]*\bhead\b"),
}


@pytest.fixture(scope="session")
def serve_port() -> Iterator[int]:
    """One Ray with one Serve proxy for the whole run; yields the proxy's port."""
    import ray
    from ray import serve

    from tests.e2e.harness import start_ray, start_serve

    start_ray()
    try:
        yield start_serve()
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="session")
def demo_app(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> App:
    """Two replicas of the demo model, each a tensor-parallel group of two, HTTP and gRPC. Tests leave it whole."""
    from tests.e2e.harness import deploy, free_port

    kept = tmp_path_factory.mktemp("kept")
    traces = tmp_path_factory.mktemp("told") / "traces.jsonl"
    sizes = {"replicas": 2, "tensor_parallel_size": 2, "cpus_per_worker": 0.5}
    told = {"otlp_traces_endpoint": f"file://{traces}", "log_format": "json", "enable_log_requests": True}
    shown = told | {"metrics_compat": "vllm", "grpc_port": free_port()}
    app = deploy(serve_port, model="demo", drain_timeout=5, batch_dir=str(kept), **sizes, **shown)
    app.traces, app.grpc_port = traces, shown["grpc_port"]
    return app


@pytest.fixture(autouse=True)
def whole_app(request: pytest.FixtureRequest) -> None:
    """Each test of the shared app finds all its replicas ready, whatever the one before has killed."""
    if "demo_app" in request.fixturenames:
        request.getfixturevalue("demo_app").wait_whole()
