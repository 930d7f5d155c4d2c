"""Load of every kind at once: tenants, shared prefixes, hang-ups, bad requests, deadlines, quotas, gRPC, a batch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import httpx

from cluster.admission.deadline import HEADER
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub

SYSTEM = "You answer questions on the standard library of Python, briefly and with an example where that helps. "
WORDS = ("os", "re", "json", "ast", "abc", "cmd", "csv", "dis", "io", "math", "time", "types", "queue", "heapq")
ROWS = 60  # of a batch


@dataclass(frozen=True)
class Target:
    """Where the app is, and the key of each tenant: `team-a`, `team-b`, and `trial` with a small quota.

    metrics_key: shows the replicas.
    """

    url: str
    grpc_port: int
    keys: Mapping[str, str]
    metrics_key: str


@dataclass(frozen=True)
class Caller:
    """What one task does again and again until `end` (of `time.monotonic`)."""

    target: Target
    end: float
    client: httpx.AsyncClient
    rng: Random

    def key(self, tenant: str) -> dict[str, str]:
        """Return the headers of a tenant."""
        return {"Authorization": f"Bearer {self.target.keys[tenant]}"}

    async def chats(self) -> None:
        """Streamed chats that begin alike."""
        question = f"{SYSTEM * self.rng.randrange(1, 5)}What does {self.rng.choice(WORDS)} do?"
        await self._stream("team-a", "chat/completions", {"messages": [{"role": "user", "content": question}]})

    async def completions(self) -> None:
        """Streamed completions of their own."""
        prompt = " ".join(self.rng.choices(WORDS, k=self.rng.randrange(5, 60)))
        await self._stream("team-b", "completions", {"prompt": prompt, "n": self.rng.choice((1, 1, 2))})

    async def hang_ups(self) -> None:
        """Streams that their clients give up."""
        await self._stream("team-b", "completions", {"prompt": "def main():\n"}, leave_after=5)
        await asyncio.sleep(1.0)

    async def late(self) -> None:
        """Requests with too little time."""
        body = {"model": "demo", "prompt": "import os", "max_tokens": 900, "ignore_eos": True}
        await self.client.post("/v1/completions", json=body, headers=self.key("team-a") | {HEADER: "0.4"})
        await asyncio.sleep(4.0)

    async def refused(self) -> None:
        """Requests that are wrong, and those of a tenant with a quota."""
        await self.client.post("/v1/completions", json={"model": "none"}, headers=self.key("team-a"))
        for _ in range(3):
            body = {"model": "demo", "prompt": "import re", "max_tokens": 8}
            await self.client.post("/v1/completions", json=body, headers=self.key("trial"))
        await asyncio.sleep(1.0)

    async def calls(self) -> None:
        """gRPC: an answer, and a refusal."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.target.grpc_port}") as channel:
            stub = InferenceStub(channel)
            for prompt in ("def main():\n", ""):
                metadata = [("authorization", self.key("team-a")["Authorization"])]
                asked = pb.GenerateRequest(model="demo", prompt=prompt, sampling=pb.Sampling(max_tokens=40))
                with suppress(grpc.aio.AioRpcError):
                    async for _ in stub.Generate(asked, metadata=metadata):
                        pass
        await asyncio.sleep(0.5)

    async def batches(self) -> None:
        """A batch after the other."""
        headers = self.key("team-b")
        upload = {"file": ("rows.jsonl", batch_rows(self.rng)), "purpose": (None, "batch")}
        file = (await self.client.post("/v1/files", files=upload, headers=headers)).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await self.client.post("/v1/batches", json=asked, headers=headers)).json()
        while batch["status"] not in ("completed", "failed", "expired") and time.monotonic() < self.end:
            await asyncio.sleep(1.0)
            batch = (await self.client.get(f"/v1/batches/{batch['id']}", headers=headers)).json()

    async def _stream(self, tenant: str, route: str, fields: Mapping[str, Any], leave_after: int = 10**9) -> None:
        tokens = self.rng.randrange(20, 160)
        body = {"model": "demo", "max_tokens": tokens, "ignore_eos": True, "stream": True, **fields}
        async with self.client.stream("POST", f"/v1/{route}", json=body, headers=self.key(tenant)) as answer:
            seen = 0
            async for _ in answer.aiter_lines():
                seen += 1
                if seen > leave_after:
                    return


def batch_rows(rng: Random) -> bytes:
    """Return a file of a batch."""
    bodies = [
        {"model": "demo", "prompt": f"import {rng.choice(WORDS)}\n", "max_tokens": 120, "ignore_eos": True}
        for _ in range(ROWS)
    ]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


async def load(target: Target, seconds: float, chats: int = 6, completions: int = 4) -> None:
    """Ask for so many seconds. What the app refuses or cuts off is part of it."""
    async with httpx.AsyncClient(base_url=target.url, timeout=60.0, trust_env=False) as client:
        caller = Caller(target, time.monotonic() + seconds, client, Random(1))
        kinds = [caller.chats] * chats + [caller.completions] * completions
        kinds += [caller.hang_ups, caller.late, caller.refused, caller.calls, caller.batches]
        await asyncio.gather(*_until(caller.end, kinds))


def _until(end: float, kinds: Sequence[Callable[[], Awaitable[None]]]) -> list[Awaitable[None]]:
    async def again(act: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < end:
            try:
                await act()
            except httpx.HTTPError:
                await asyncio.sleep(0.2)  # of a router or proxy that was busy: asked again

    return [again(act) for act in kinds]
