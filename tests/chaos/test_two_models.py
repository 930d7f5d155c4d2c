"""Two models in one app: each answers as it does alone, and what befalls one is nothing to the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ray import serve
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.app import build
from deploy.demo import demo_model_path
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests import tiny_tokenizer
from tests.chaos.streams import WHOLE, Stream, check_exact, client_of, greedy_or_seeded, read_all, read_stream
from tests.chaos.strike import Strike
from tests.e2e.harness import App, deploy, eventually, kill, processes

NAME = "two-models"
TOKENS = 120
STREAMS = 6
PROMPTS = ["def main():\n    ", "The quick brown fox", "x"]


def save_tiny(folder: Path, seed: int) -> str:
    """A random model with a vocabulary of its own, whose every part matters for its tokens."""
    backend = tiny_tokenizer.byte_level(400)
    tiny_tokenizer.save(backend, folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=backend.token_to_id("<|bos|>"),
        eos_token_id=backend.token_to_id("<|eos|>"),
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo, a tiny model, and the one that an update puts in the tiny one's place."""
    tiny, later = (save_tiny(tmp_path_factory.mktemp(f"tiny{seed}"), seed) for seed in (1, 2))
    return {"demo": str(demo_model_path()), "tiny": tiny, "later": later}


def settings(tiny: str) -> dict[str, Any]:
    """Two replicas of the demo, one of the tiny model over two ranks."""
    return {
        "cpus_per_worker": 0.25,
        "dtype": "float32",
        "models": [
            {"model": "demo", "replicas": 2},
            {"model": tiny, "served_model_name": ["tiny", "small"], "tensor_parallel_size": 2},
        ],
    }


@pytest.fixture(scope="module")
def app(serve_port: int, folders: dict[str, str]) -> Iterator[App]:
    yield deploy(serve_port, NAME, **settings(folders["tiny"]))
    serve.delete(NAME)


def alone(folder: str) -> list[list[int]]:
    """Return what a model says to the prompts with nobody beside it."""
    with LLM(folder, dtype="float32", num_kv_blocks=64) as llm:
        found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    return [list(result.outputs[0].token_ids) for result in found]


def asked(model: str, tokens: int = TOKENS) -> list[dict[str, Any]]:
    return [greedy_or_seeded(index, tokens, model) for index in range(STREAMS)]


async def greedy(app: App, model: str) -> list[list[int]]:
    given = {"model": model, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    async with client_of(app.url) as client:
        streams = await read_all(client, [given | {"prompt": prompt} for prompt in PROMPTS])
    assert {stream.kind for stream in streams} == {WHOLE}
    return [stream.tokens for stream in streams]


def pids(app: App, model: str) -> set[int]:
    return {pid for replica in app.ready()["replicas"] if replica["model"] == model for pid in replica["pids"]}


@asynccontextmanager
async def steady_load(app: App, model: str, oracle: list[Stream]) -> AsyncIterator[None]:
    """Keep streams of a model running meanwhile; at the end all were whole and exact."""
    over = asyncio.Event()

    async def one(client: httpx.AsyncClient, index: int) -> None:
        while not over.is_set():
            stream = await read_stream(client, asked(model)[index])
            check_exact([stream], [oracle[index]])

    async with client_of(app.url) as client, asyncio.TaskGroup() as group:
        for index in range(STREAMS):
            group.create_task(one(client, index))
        try:
            yield
        finally:
            over.set()


async def oracle_of(app: App, model: str) -> list[Stream]:
    async with client_of(app.url) as client:
        streams = await read_all(client, asked(model))
    check_exact(streams, streams)
    return streams


async def test_each_model_answers_as_it_does_alone(app: App, folders: dict[str, str]) -> None:
    demo, tiny = await asyncio.gather(greedy(app, "demo"), greedy(app, "small"))
    assert demo == alone(folders["demo"])
    assert tiny == alone(folders["tiny"])
    cards = httpx.get(f"{app.url}/v1/models", timeout=10).json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [("demo", "demo"), ("tiny", "tiny"), ("small", "tiny")]


async def test_a_killed_replica_of_one_model_costs_neither_model_a_token(app: App) -> None:
    demo, tiny = await oracle_of(app, "demo"), await oracle_of(app, "tiny")
    tiny_pids = pids(app, "tiny")
    victim = processes(f"ray::ServeReplica:{NAME}:Replica-demo")[0]
    strike = Strike(STREAMS * TOKENS // 3, lambda: kill(victim))
    moved = {model: app.metric("squadron_migrations_total", model_name=model) for model in ("demo", "tiny")}
    async with steady_load(app, "tiny", tiny), client_of(app.url) as client:
        check_exact(await read_all(client, asked("demo"), strike), demo)
    assert strike.at, "the streams ended before the kill"
    assert app.metric("squadron_migrations_total", model_name="demo") > moved["demo"], "the kill missed the streams"
    assert app.metric("squadron_migrations_total", model_name="tiny") == moved["tiny"]
    app.wait_whole()
    assert pids(app, "tiny") == tiny_pids


async def test_a_model_without_replicas_is_a_503_and_the_other_goes_on(app: App) -> None:
    demo = await oracle_of(app, "demo")
    before = pids(app, "tiny")
    async with steady_load(app, "demo", demo), httpx.AsyncClient(base_url=app.url, timeout=30) as client:
        with nothing_replaced():
            kill(processes(f"ray::ServeReplica:{NAME}:Replica-tiny")[0])
            await unserved(client, "tiny")
            began = time.monotonic()
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1})
            took = time.monotonic() - began
            whole = await client.get("/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert int(answer.headers["retry-after"]) >= 1
    assert took < 3.0, f"refused after {took:.1f} s"  # 1 s and what a busy machine adds
    assert whole.status_code == 200
    app.wait_whole()
    assert pids(app, "tiny").isdisjoint(before)
    assert httpx.get(f"{app.url}/ready", params={"model": "tiny"}, timeout=10).status_code == 200


@contextmanager
def nothing_replaced() -> Iterator[None]:
    """Have Serve's controller stand still, so that no other replica comes before a request was refused."""
    (controller,) = processes("ray::ServeController")
    controller.suspend()
    try:
        yield
    finally:
        controller.resume()


async def unserved(client: httpx.AsyncClient, model: str) -> None:
    """Return when the router knows that a model has no replica; the app is ready all the while."""
    async with asyncio.timeout(20):
        while (await client.get("/ready", params={"model": model})).status_code != 503:
            await asyncio.sleep(0.02)


def _replaced(app: App, before: set[int]) -> bool:
    """Whether none of the processes that served the other model before does now, and others do."""
    return bool(pids(app, "tiny")) and pids(app, "tiny").isdisjoint(before)


async def test_an_update_of_one_model_truncates_no_stream_of_the_other(app: App, folders: dict[str, str]) -> None:
    expected = alone(folders["later"])
    before = pids(app, "tiny")
    long = [one | {"max_tokens": 1000} for one in asked("demo")[:4]]
    begun: set[int] = set()
    over = asyncio.Event()

    async def read_on(client: httpx.AsyncClient, undisturbed: list[Stream]) -> None:
        while not over.is_set():
            check_exact(await read_all(client, long, lambda stream: begun.add(id(stream))), undisturbed)

    async with client_of(app.url) as client:
        running = asyncio.create_task(read_on(client, await read_all(client, long)))
        while len(begun) < len(long):
            await asyncio.sleep(0.01)
        target = serve.RunTarget(build(settings(folders["later"])), name=NAME, route_prefix=f"/{NAME}")
        await asyncio.to_thread(serve.run_many, [target], wait_for_applications_running=False)
        is_there = partial(_replaced, app, before)
        await asyncio.to_thread(eventually, is_there, "the new model", 60)
        over.set()
        await running
    app.wait_whole()
    assert await greedy(app, "tiny") == expected
    assert await greedy(app, "demo") == alone(folders["demo"])
