"""One replica and one router in one process, without Ray: the front end, the dispatcher and the engine as served.

    python -m tests.clients.server [--port 8000]

The model is the demo model with a template that reads tools, called "demo", with room for the long prompts of agents:
what it says beyond its own 2,048 tokens is worse still. The address is the first line printed.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import torch
import uvicorn

from cluster.config import ClusterConfig, resolve_config
from cluster.http.app import build_app
from cluster.replica.core import ReplicaCore
from cluster.replica.sessions import ReplicaFacts
from cluster.router.dispatcher import Dispatcher
from cluster.router.live_model import admission_queue, dispatcher_config
from cluster.router.models import ModelFront, Models, served_model
from cluster.telemetry.metrics import Metrics, ReplicaSetStats
from engine.core import EngineCore
from engine.grammar.compile_service import GrammarService
from engine.text.tokenizer import Tokenizer
from engine.worker.executor_start import ModelInfo, build_executor
from tests.clients.model import write_model
from tests.simulator.links import connect_local

MODEL = "demo"
CONTEXT = 65_536  # tokens


@asynccontextmanager
async def app_around(config: ClusterConfig) -> AsyncIterator[object]:
    """Give the ASGI app around a replica in this process; the replica ends with the context."""
    executor, info = build_executor(config.engine)
    core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
    tokenizer = Tokenizer(config.model)
    grammars = GrammarService(partial(tokenizer.vocabulary, info.vocab_size), info.eos_token_ids)
    replica = ReplicaCore(core, _facts(config, info), grammars=grammars)
    dispatcher = Dispatcher(dispatcher_config(config))
    dispatcher.add_link(await connect_local(replica.serve, "router"))
    metrics = Metrics()
    figures = metrics.of(config.model_id, ReplicaSetStats)
    front = ModelFront(served_model(config), admission_queue(config, dispatcher), figures, ready=lambda: True)
    try:
        yield build_app(Models([front]), metrics, lambda: {"ready": True, "replicas": []})
    finally:
        await dispatcher.close()
        await replica.close()


def _facts(config: ClusterConfig, info: ModelInfo) -> ReplicaFacts:
    return ReplicaFacts(
        "replica",
        config.model_id,
        info.config.context_len,
        info.vocab_size,
        info.config.block_size,
        info.num_kv_blocks - 1,
        info.eos_token_ids,
        token_budget=info.config.token_budget,
    )


async def serve(config: ClusterConfig, port: int) -> None:
    """Serve on the loopback until Ctrl-C."""
    async with app_around(config) as app:
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="on"))
        serving = asyncio.create_task(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1", flush=True)
        await serving


def main() -> None:
    """Serve the demo model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0, the default, is any free one")
    given = parser.parse_args()
    torch.set_num_threads(1)  # so small a model waits for its threads where the cores are busy
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model(Path(folder) / MODEL))
        settings = {
            "model": model,
            "served_model_name": MODEL,
            "tool_call_parser": "hermes",
            "hf_overrides": {"max_position_embeddings": CONTEXT},
            "device": "cpu",
        }
        asyncio.run(serve(resolve_config(settings), given.port))


if __name__ == "__main__":
    main()
