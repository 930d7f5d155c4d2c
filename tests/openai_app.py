"""The OpenAI front end around a fake source, and a real server for it on a free loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import uvicorn

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.capacity import UNBOUNDED
from cluster.admission.keys import FixedKeys
from cluster.admission.tenants import Tenancy
from cluster.http.app import build_app
from cluster.openai.served_model import ServedModel
from cluster.router.models import ModelFront, Models
from cluster.telemetry.metrics import Metrics, ReplicaSetStats
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.fake_source import FakeSource

MODEL = "demo"


def served_model(folder: Path, name: str = MODEL, **changes) -> ServedModel:
    """A model that is nothing but a tokenizer."""
    tokenizer = Tokenizer(str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)))
    given = {"max_model_len": 256, "vocab_size": tokenizer.vocab_size, "created": 1_700_000_000} | changes
    return ServedModel(name, tokenizer, **given)


def saying(model: ServedModel, *texts: str, **changes) -> FakeSource:
    """A source whose choice `i` says `texts[i]` and then ends with the end-of-sequence token."""
    eos = model.tokenizer.eos_token_id
    plans = [[*model.tokenizer.encode(text), eos] for text in texts]
    return FakeSource(lambda _, choice: plans[choice % len(plans)], eos=eos, **changes)


def front_for(
    source,
    model: ServedModel,
    metrics: Metrics,
    admission: AdmissionQueue | None = None,
    figures=ReplicaSetStats,
    **changes,
) -> ModelFront:
    """A model whose tokens come from `source`."""
    given = {"ready": lambda: True} | changes
    return ModelFront(
        model, admission or AdmissionQueue(source, lambda: UNBOUNDED), metrics.of(model.model_id, figures), **given
    )


def two_models_app(first: ModelFront, second: ModelFront, metrics: Metrics, **changes):
    """The app around two models that were made with `metrics`."""
    given = {"ready": lambda: {"ready": True, "replicas": []}} | changes
    return build_app(Models([first, second]), metrics, **given)


def app_for(source, model: ServedModel, *, api_key=None, admission=None, figures=ReplicaSetStats, **changes):
    """The app with everything a test does not care about filled in."""
    given = {"metrics": Metrics(), "ready": lambda: {"ready": True, "replicas": []}} | changes
    if api_key is not None:
        given["tenancy"] = Tenancy(FixedKeys.one(api_key))
    models = Models([front_for(source, model, given["metrics"], admission, figures)])
    return build_app(models, **given)


def client_for(app) -> httpx.AsyncClient:
    """A client that talks to the app without a network."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def events(text: str) -> list[dict | str]:
    """The data of each server-sent event, JSON parsed, `[DONE]` as it is."""
    blocks = text.split("\n\n")
    assert blocks[-1] == "", "the last event is cut"
    data = [block.removeprefix("data: ") for block in blocks[:-1]]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


@contextlib.asynccontextmanager
async def serving(app) -> AsyncIterator[str]:
    """Run the app under uvicorn on a free port and give its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), "the server did not start"
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
