"""kill -9 of a replica under streams of models of every kind: no token is lost or changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from tests.chaos.streams import check_exact, client_of, read_all
from tests.e2e.harness import App, deploy, kill, processes
from tests.long import long
from tests.parity.census import save_oracle
from tests.parity.stored_formats import FORMATS, store

NAME = "kinds"
STREAMS, TOKENS = 16, 90
# Experts with sinks; a hybrid with recurrent state; latent attention with experts in groups; and one without a native
# family, through the layers of the transformers library.
KINDS = ["gpt_oss", "lfm2", long("deepseek_v3"), long("exaone4")]
# Experts in four bits, made as they load; and each format of quantised checkpoints.
MADE = {"quantization": "int4", "quantization_group_size": 16}
QUANTISED = ["made", *(long(kind) for kind in FORMATS)]


def asked(index: int) -> dict[str, Any]:
    """Return request `index`, half greedy, half seeded."""
    sampling = {"temperature": 0} if index % 2 == 0 else {"temperature": 0.8, "seed": index}
    prompt = [3 + (index * 17 + place * 5) % 240 for place in range(4 + index)]
    return {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **sampling}


def deployed(serve_port: int, folder: Path, **more: Any) -> Iterator[App]:
    """Two replicas of a tiny random model."""
    settings = {"served_model_name": NAME, "replicas": 2, "cpus_per_worker": 0.5, "dtype": "float32"}
    yield deploy(serve_port, NAME, model=str(folder), **settings, **more)
    serve.delete(NAME)


@pytest.fixture(params=KINDS)
def app(serve_port: int, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    yield from deployed(serve_port, save_oracle(request.param, tmp_path).folder)


@pytest.fixture(params=QUANTISED)
def quantised(serve_port: int, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    plain = save_oracle("qwen3_moe", tmp_path / "base", hidden_size=64, intermediate_size=96).folder
    if request.param == "made":
        yield from deployed(serve_port, plain, **MADE)
    else:
        store(plain, tmp_path, *FORMATS[request.param])
        yield from deployed(serve_port, tmp_path / "stored")


async def test_every_stream_survives_a_kill(app: App) -> None:
    await survives(app)


async def test_streams_of_quantised_weights_survive_one_too(quantised: App) -> None:
    await survives(quantised)


async def survives(app: App) -> None:
    async with client_of(app.url) as client:
        requests = [asked(index) for index in range(STREAMS)]
        undisturbed = await read_all(client, requests)
        begun = asyncio.Event()
        running = asyncio.create_task(
            read_all(client, requests, lambda stream: begun.set() if len(stream.tokens) > 10 else None)
        )
        await begun.wait()
        kill(processes(f"ray::ServeReplica:{NAME}:Replica")[0])
        check_exact(await running, undisturbed)
    assert app.metric("squadron_migrations_total") > 0, "the killed replica ran none of them"
    app.wait_whole()
