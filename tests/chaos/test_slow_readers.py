"""A client that stops reading, behind Ray Serve's own proxy (FAULTS 23); without Ray: `test_clients.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from ray import serve
from transformers import LlamaConfig, LlamaForCausalLM

from tests import tiny_tokenizer
from tests.chaos.raw_http import last_error, stalled
from tests.chaos.streams import check_exact, client_of, greedy_or_seeded, read_all
from tests.e2e.harness import App, deploy, eventually, proxy_processes, router_processes

NAME = "slow-readers"
CONTEXT = 16384
pytestmark = pytest.mark.timeout(300)
STALLED = 4  # clients
TOKENS = 16_000  # 25 MB with their log-probabilities, for each
LONG = {"model": "demo", "prompt": "x", "ignore_eos": True, "max_tokens": TOKENS, "logprobs": 20}
MOST_GROWTH = 40 << 20  # bytes: for each a window, what waits behind it, and what Python makes of either


def save_tiny(folder: Path) -> str:
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
    return str(folder)


@pytest.fixture(scope="module")
def app(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """One router and one replica."""
    model = save_tiny(tmp_path_factory.mktemp("tiny"))
    yield deploy(serve_port, NAME, model=model, served_model_name="demo", cpus_per_worker=0.5)
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
