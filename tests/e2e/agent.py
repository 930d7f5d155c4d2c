"""Ray's metrics agent of this machine, as Prometheus would scrape it, and a question of which it is to tell."""

from __future__ import annotations

import grpc
import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from tests.e2e.harness import App

SECONDS = 45.0  # until it has been told all there is; Ray tells it every ten


def metrics_at_the_agent() -> set[str]:
    """Return the names of the metrics that have samples."""
    (node,) = ray.nodes()
    text = httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10).text
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def ask_over_grpc(app: App) -> None:
    """Have one answer made over gRPC."""
    request = pb.GenerateRequest(model="demo", prompt="import os", sampling=pb.Sampling(max_tokens=4))
    with grpc.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        assert list(InferenceStub(channel).Generate(request, timeout=60))
