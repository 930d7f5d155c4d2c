"""The whole way of a request without Ray: real HTTP, front end, dispatcher, scheduler, and a fake model.

What clients do to their connections is seen here in milliseconds, with every block accounted for.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from cluster.dispatch_config import DispatcherConfig
from cluster.dispatcher import Dispatcher
from cluster.links.local import connect_local
from cluster.replica_core import ReplicaCore
from cluster.replica_facts import ReplicaFacts
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.fake_executor import FakeExecutor
from tests.chaos.streams import Stream, client_of, read_stream
from tests.openai_app import MODEL, app_for, served_model, serving
from tests.unit.cluster_lab import CheckedCore, until

BLOCK = 16
CONTEXT = 8000
NUM_BLOCKS = 600  # checked after each step, so no more than is needed


class Front:
    """A front end on a loopback port over one replica on the fake model; leaving it checks that nothing is left.

    pace: seconds of each step; 0 leaves out the check after each, too. max_pending_tokens: as in `DispatcherConfig`.
    """

    def __init__(self, folder: Path, pace: float = 0.002, max_pending_tokens: int = 4096) -> None:
        self.model = served_model(folder, max_model_len=CONTEXT)
        self._pace = pace
        self._config = DispatcherConfig(max_pending_tokens=max_pending_tokens)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Front:
        self.dispatcher = Dispatcher(self._config)
        self.replica = self._replica()
        self.dispatcher.add_link(await connect_local(self.replica.serve, "router"))
        app = app_for(self.dispatcher, self.model)
        self.url = await self._stack.enter_async_context(serving(app))
        self.client = await self._stack.enter_async_context(client_of(self.url))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.quiet()
        finally:
            await self._stack.aclose()
            await self.dispatcher.close()
            await self.replica.close()

    @property
    def port(self) -> int:
        """Where the server listens."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def held_blocks(self) -> int:
        """KV blocks that some request holds."""
        stats = self.replica.stats
        return stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached

    async def quiet(self) -> None:
        """Wait until no request lives and no block is held; requests must add up."""
        await until(lambda: not (self.dispatcher.num_live or self.replica.num_requests or self.held_blocks))
        counters = self.dispatcher.counters
        assert counters.accepted == counters.outcomes.total()
        assert not counters.misplaced_rows

    async def ask(self, index: int, tokens: int = 40, **changes: Any) -> Stream:
        """Read one stream of a set; equal numbers bring equal tokens."""
        return await read_stream(self.client, body(index, tokens, **changes))

    def _replica(self) -> ReplicaCore:
        vocab = self.model.vocab_size
        config = EngineConfig("fake", max_model_len=CONTEXT, max_num_seqs=64, block_size=BLOCK)
        executor = FakeExecutor(NUM_BLOCKS, BLOCK, vocab, lambda _: self._pace)
        core = CheckedCore if self._pace else EngineCore
        engine = core(config, executor, (self.model.tokenizer.eos_token_id or 0,), vocab, NUM_BLOCKS)
        return ReplicaCore(engine, ReplicaFacts("a", MODEL, CONTEXT, vocab, BLOCK, NUM_BLOCKS - 1))


def body(index: int, tokens: int = 40, **changes: Any) -> dict[str, Any]:
    """Return request `index` of a set."""
    asked = {"model": MODEL, "prompt": f"request {index}", "max_tokens": tokens, "ignore_eos": True, "seed": index}
    return {**asked, "temperature": index % 2, **changes}


def raw_request(asked: dict[str, Any]) -> bytes:
    """Return the bytes of a POST of `asked`."""
    content = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a RST, as the kernel of a client does that died with unread data."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await asyncio.sleep(0)
