"""Tokens per second over gRPC: streams through the router's own server, with an engine that costs nothing.

    python -m tests.bench.grpc_stream [--streams 32] [--tokens 1000] [--chunk 1]

The server is a process of its own on loopback and so is the client, which reads bytes and only counts. `--chunk` is
the number of tokens that a delivery brings: one as an engine step does, more where a client or a link falls behind.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk
from engine.request import Request
from tests.bench.openai_stream import SteppingSource
from tests.grpc_client import serving_grpc
from tests.openai_app import MODEL, served_model


class ChunkingSource(SteppingSource):
    """Hands out `chunk` tokens at a time."""

    def __init__(self, token_ids: list[int], chunk: int) -> None:
        super().__init__(token_ids)
        self._chunk = chunk

    async def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Yield `chunk` tokens a step."""
        async for one in super().generate(request):
            yield TokenChunk(0, one.token_ids * self._chunk, finish_reason=one.finish_reason)


async def serve(pipe: Connection, chunk: int) -> None:
    """Run the server until the parent ends it."""
    with tempfile.TemporaryDirectory() as folder:
        model = served_model(Path(folder), max_model_len=10**6)
        text = "The quick brown fox jumps over the lazy dog, again and again and again.\n"
        async with serving_grpc(ChunkingSource(model.tokenizer.encode(text), chunk), model) as served:
            pipe.send(served.server.port)
            await asyncio.Event().wait()


def server_process(pipe: Connection, chunk: int) -> None:
    """The server's process."""
    asyncio.run(serve(pipe, chunk))


async def ask(port: int, streams: int, steps: int) -> tuple[float, int]:
    """Return the seconds of all streams and the messages that came."""
    request = pb.GenerateRequest(model=MODEL, prompt="x", sampling=pb.Sampling(max_tokens=steps)).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.unary_stream("/squadron.v1.Inference/Generate")

        async def stream() -> int:
            return sum([1 async for _ in method(request)])

        await stream()
        began = time.perf_counter()
        messages = await asyncio.gather(*[stream() for _ in range(streams)])
        return time.perf_counter() - began, sum(messages)


def run(streams: int = 32, tokens: int = 1000, chunk: int = 1) -> tuple[float, float]:
    """Start a server, measure, stop it; returns tokens and messages per second."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(target=server_process, args=(theirs, chunk), daemon=True)
    server.start()
    try:
        steps = max(tokens // chunk, 1)
        seconds, messages = asyncio.run(ask(mine.recv(), streams, steps))
        return streams * steps * chunk / seconds, messages / seconds
    finally:
        server.terminate()
        server.join()


def measure() -> dict[str, float]:
    """Return the figures by name."""
    tokens, messages = run()
    return {"grpc_tokens_per_s_32": tokens, "grpc_messages_per_s_32": messages}


def main() -> None:
    """Print one line of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--chunk", type=int, default=1)
    given = parser.parse_args()
    tokens, messages = run(given.streams, given.tokens, given.chunk)
    print(f"{given.streams} gRPC streams: {tokens:,.0f} tokens/s in {messages:,.0f} messages/s")


if __name__ == "__main__":
    main()
