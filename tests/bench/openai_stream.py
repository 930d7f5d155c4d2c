"""Tokens per second on the wire: streams through the whole HTTP front end, with an engine that costs nothing.

    python -m tests.bench.openai_stream [--streams 32] [--tokens 1000] [--endpoint chat/completions]

The server (uvicorn on loopback) is a process of its own; the client reads raw sockets and only counts. The source
hands out one token per request and step, through a queue per request, as the router's dispatcher does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import uvicorn

from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk
from engine.request import Request
from tests.openai_app import MODEL, app_for, served_model


class SteppingSource:
    """All live requests get their next token in the same step; the next step comes when all were taken."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._queues: dict[str, asyncio.Queue[TokenChunk]] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Yield a token a step."""
        queue = self._queues[request.request_id] = asyncio.Queue()
        if self._stepper is None:
            self._stepper = asyncio.create_task(self._steps())
        try:
            for i in range(request.params.max_tokens or 0):
                chunk = await queue.get()
                if i + 1 == request.params.max_tokens:
                    chunk = TokenChunk(0, chunk.token_ids, finish_reason="length")
                yield chunk
        finally:
            del self._queues[request.request_id]

    def finish_choice(self, request_id: str, choice: int) -> None:
        """Nothing to end: no stop strings here."""

    async def _steps(self) -> None:
        step = 0
        while True:
            chunk = TokenChunk(0, (self._token_ids[step % len(self._token_ids)],))
            for queue in self._queues.values():
                if queue.empty():
                    queue.put_nowait(chunk)
            step += 1
            await asyncio.sleep(0)


def serve(listener: socket.socket, ready: Connection) -> None:
    """Run the server until the parent ends it."""
    with tempfile.TemporaryDirectory() as folder:
        model = served_model(Path(folder), max_model_len=10**6)
        text = "The quick brown fox jumps over the lazy dog, again and again and again.\n"
        app = app_for(SteppingSource(model.tokenizer.encode(text)), model)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
        ready.send(True)
        server.run(sockets=[listener])


async def stream(port: int, endpoint: str, tokens: int) -> int:
    """Read one stream to its end and return the number of chunks with text."""
    prompt = {"prompt": "x"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = json.dumps({"model": MODEL, "max_tokens": tokens, "stream": True, **prompt}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/{endpoint} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    found, tail = 0, b""
    while b"[DONE]" not in tail:
        data = await reader.read(65536)
        if not data:
            raise RuntimeError(f"the stream ended early: {tail!r}")
        found += data.count(b"data: {")
        tail = (tail + data)[-200:]
    writer.close()
    return found


async def ask(port: int, endpoint: str, streams: int, tokens: int) -> tuple[float, float]:
    """Return tokens and chunks per second over all streams."""
    await stream(port, endpoint, 50)
    began = time.perf_counter()
    chunks = await asyncio.gather(*[stream(port, endpoint, tokens) for _ in range(streams)])
    took = time.perf_counter() - began
    return streams * tokens / took, sum(chunks) / took


def run(streams: int = 32, tokens: int = 1000, endpoint: str = "chat/completions") -> tuple[float, float]:
    """Start a server, measure, stop it; returns tokens and chunks per second."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine, theirs = context.Pipe()
        server = context.Process(target=serve, args=(listener, theirs), daemon=True)
        server.start()
        try:
            mine.recv()
            return asyncio.run(ask(listener.getsockname()[1], endpoint, streams, tokens))
        finally:
            server.terminate()
            server.join()


def measure() -> dict[str, float]:
    """Return the figures by name: 32 streams of chat, the costlier of the two endpoints."""
    tokens, chunks = run()
    return {"wire_tokens_per_s_32": tokens, "wire_chunks_per_s_32": chunks}


def main() -> None:
    """Print one line of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--endpoint", default="chat/completions", choices=["chat/completions", "completions"])
    given = parser.parse_args()
    tokens, chunks = run(given.streams, given.tokens, given.endpoint)
    print(f"{given.streams} streams of {given.endpoint}: {tokens:,.0f} tokens/s in {chunks:,.0f} chunks/s")


if __name__ == "__main__":
    main()
