"""One replica of a tiny model: slow readers (FAULTS 23), a crash loop (FAULTS 10), an app deleted under a stream.

Slow readers without Ray: `test_clients.py`. The last test deletes the app.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import httpx
import pytest
import torch
from ray import serve
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from deploy.status import Condition, ReplicaLine, StatusReport, fetch
from tests import tiny_tokenizer
from tests.chaos.raw_http import last_error, stalled
from tests.chaos.streams import check_exact, client_of, greedy_or_seeded, read_all
from tests.e2e.harness import App, deploy, eventually, free_port, kill, processes, proxy_processes, router_processes
from tests.grpc_client import gathered

NAME = "lone"
CONTEXT = 16384
pytestmark = pytest.mark.timeout(300)
STALLED = 4  # clients
TOKENS = 16_000  # 25 MB with their log-probabilities, for each
LONG = {"model": "demo", "prompt": "x", "ignore_eos": True, "max_tokens": TOKENS, "logprobs": 20}
MOST_GROWTH = 40 << 20  # bytes: for each a window, what waits behind it, and what Python makes of either


def save_tiny(folder: Path) -> None:
    """A random model with a long context, whose tokens cost next to nothing."""
    backend = tiny_tokenizer.byte_level(400)
    tiny_tokenizer.save(backend, folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=backend.token_to_id("<|bos|>"),
        eos_token_id=backend.token_to_id("<|eos|>"),
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def app(serve_port: int, model: Path) -> Iterator[App]:
    """One router and one replica."""
    port = free_port()
    settings = {"served_model_name": "demo", "cpus_per_worker": 0.5, "drain_timeout": 20, "grpc_port": port}
    app = deploy(serve_port, NAME, model=str(model), **settings)
    app.grpc_port = port
    yield app
    serve.delete(NAME)


def resident() -> dict[str, int]:
    """Bytes that the proxy and the router hold."""
    ((proxy,), (router,)) = proxy_processes(), router_processes(NAME)
    return {"proxy": proxy.memory_info().rss, "router": router.memory_info().rss}


async def test_readers_that_stop_fill_neither_proxy_nor_router_are_told_and_slow_nobody(app: App) -> None:
    beside = [greedy_or_seeded(index, 300) for index in range(4)]
    async with client_of(app.url) as client:
        oracle = await read_all(client, beside)
        before = resident()
        clients = [await stalled(app.port, LONG, app.prefix) for _ in range(STALLED)]
        try:
            got = await read_all(client, beside)
            check_exact(got, oracle)
            gaps = [b - a for stream in got for a, b in pairwise(stream.times)]
            assert max(gaps) < 2.0, "a token came late beside slow readers"
            await asyncio.to_thread(eventually, lambda: not inside(app), "none of them is generated for", 120)
            assert app.metric("squadron_requests_live") == STALLED, "they wait for their readers"
            assert app.metric("squadron_kv_cache_usage_perc") == 0
            assert app.metric("squadron_generation_tokens_total") < STALLED * TOKENS / 2, "kernels take some, too"
            grown = {name: size - before[name] for name, size in resident().items()}
            assert max(grown.values()) < MOST_GROWTH, grown
            errors = await asyncio.gather(*(last_error(*one) for one in clients))
            assert {error["code"] for error in errors} == {"slow_consumer"}
            await asyncio.to_thread(eventually, lambda: ended(app) == STALLED, "their end is counted")
        finally:
            for _, writer in clients:
                writer.transport.abort()


def inside(app: App) -> float:
    """Tokens of requests that replicas have to do with."""
    return app.metric("squadron_tokens_dispatched") + app.metric("squadron_num_requests_running")


def ended(app: App) -> float:
    """Requests that were given up for their readers."""
    return app.metric("squadron_requests_ended_total", outcome="slow_consumer")


def report(app: App) -> StatusReport:
    with httpx.Client(base_url=app.url, timeout=10) as client:
        return fetch(client)


def held_back(app: App) -> ReplicaLine | None:
    """Return the replica that waits for its next try."""
    return next((one for one in report(app).replicas if one.state == "crash-looping" and one.next_try), None)


def failed_starts(app: App) -> float | None:
    """Return what `/metrics` tells of starts that failed in a row, for the alert on crash loops."""
    text = httpx.get(f"{app.url}/metrics", timeout=10).text
    told = re.search(r'^squadron_replica_failed_starts{model_name="demo"} (.*)$', text, re.MULTILINE)
    return None if told is None else float(told[1])


def test_a_crash_loop_slows_down_says_why_and_ends_when_the_cause_does(app: App, model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    kill(processes(f"ray::ServeReplica:{NAME}:Replica")[0])
    waiting: ReplicaLine = eventually(lambda: held_back(app), "a start is held back", 90)
    assert waiting.failed_starts >= 2
    assert "model.safetensors: truncated or damaged" in waiting.reason
    eventually(lambda: (failed_starts(app) or 0) >= 2, "the figure of failed starts grows", 60)
    seen = report(app)
    assert seen.condition is Condition.NOT_READY
    assert any("truncated" in line.reason for line in seen.replicas)
    weights.write_bytes(whole)
    eventually(lambda: report(app).condition is Condition.READY, "it serves again", 90)
    eventually(lambda: failed_starts(app) == 0, "the figure of failed starts is 0 again", 30)
    assert [line.state for line in report(app).replicas] == ["ready"]


async def listening(port: int) -> bool:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await InferenceStub(channel).Health(pb.HealthRequest(), timeout=5)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # a busy machine: it may be there
                return True
            # gRPC drops what arrives in the very moment when a server stops: CANCELLED.
            assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            return False
    return True


async def test_a_deleted_app_lets_grpc_streams_finish(app: App) -> None:
    """Serve counts only what comes through its own proxies: it is the router that waits for gRPC's."""
    # More than fits into the connection's window: the stream ends only once it is read.
    sampling = pb.Sampling(temperature=0.0, max_tokens=2000, logprobs=20, ignore_eos=True)
    request = pb.GenerateRequest(model="demo", prompt="x", output=pb.OUTPUT_TEXT_AND_TOKENS, sampling=sampling)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        call = InferenceStub(channel).Generate(request)
        assert (await call.read()).request_id
        serve.delete(NAME, _blocking=False)
        async with asyncio.timeout(30):
            while await listening(app.grpc_port):
                await asyncio.sleep(0.02)
        told = await gathered(call)
    assert told.usage.completion_tokens == len(told.logprobs) == 2000
    await asyncio.to_thread(eventually, lambda: NAME not in serve.status().applications, "the app is gone")
