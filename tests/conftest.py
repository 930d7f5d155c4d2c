"""Fixtures shared by the folders that need a cluster. Ray is imported only by the tests that use them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# Triton decides when a kernel is defined whether its interpreter runs it, so this precedes every import of ours.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

if TYPE_CHECKING:
    from tests.e2e.harness import App

# A shell that runs the tests in the background has them ignore Ctrl-C, which the tests of Ctrl-C would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine must not fail a property: examples have no deadline of their own, tests have pytest's.
settings.register_profile("squadron", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("squadron")


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
    """Two replicas of the demo model, each a tensor-parallel group of two. Tests leave it whole."""
    from tests.e2e.harness import deploy

    kept = tmp_path_factory.mktemp("kept")
    traces = tmp_path_factory.mktemp("told") / "traces.jsonl"
    sizes = {"replicas": 2, "tensor_parallel_size": 2, "cpus_per_worker": 0.5}
    told = {"otlp_traces_endpoint": f"file://{traces}", "log_format": "json", "enable_log_requests": True}
    shown = told | {"metrics_compat": "vllm"}
    app = deploy(serve_port, model="demo", drain_timeout=5, batch_dir=str(kept), **sizes, **shown)
    app.traces = traces
    return app
