"""The clients: each asks for a long answer, compares it with the undisturbed one, and asks again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.cli.client import DONE, event_data
from deploy.failover.board import StreamState
from engine.errors import SquadronError

PROMPTS = (
    "def main():\n",
    "import os\n",
    "class Stack:\n",
    "def read_lines(path):\n",
    "for name in sorted(",
    "class TestCase(",
    "try:\n    import ",
    "def __init__(self, ",
)
PAUSE = 0.5  # seconds before a client that was refused asks again


class BrokenAnswerError(SquadronError):
    """An answer that did not come whole; one sentence."""


@dataclass(frozen=True, slots=True)
class Question:
    """What one client asks, always the same. Half of them draw greedily, half by a seed."""

    model: str
    number: int
    tokens: int

    def body(self) -> dict[str, Any]:
        """Return the request."""
        sampling = {"temperature": 0.8, "seed": self.number} if self.number % 2 else {"temperature": 0.0}
        return {
            "model": self.model,
            "prompt": PROMPTS[self.number % len(PROMPTS)],
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **sampling,
        }


async def record(client: httpx.AsyncClient, question: Question) -> list[int]:
    """Return the token ids of the answer while nothing disturbs. Raises `BrokenAnswerError`."""
    return [token async for tokens, _ in _pieces(client, question) for token in tokens]


async def ask_again_and_again(
    client: httpx.AsyncClient, question: Question, state: StreamState, stopping: asyncio.Event
) -> None:
    """Keep one stream going until `stopping`; the one under way then is seen to its end."""
    while not stopping.is_set():
        state.begin()
        try:
            async for tokens, text in _pieces(client, question):
                state.news(tokens, text, time.monotonic())
            _judge(state)
        except (BrokenAnswerError, httpx.HTTPError) as error:
            state.failed += 1
            state.error = str(error) or type(error).__name__
            await asyncio.sleep(PAUSE)
        finally:
            state.live = False


def _judge(state: StreamState) -> None:
    if state.tokens == state.reference:
        state.exact += 1
        return
    state.failed += 1
    same = next((i for i, (a, b) in enumerate(zip(state.tokens, state.reference, strict=False)) if a != b), None)
    where = min(len(state.tokens), len(state.reference)) if same is None else same
    state.error = f"differs from token {where} on"


async def _pieces(client: httpx.AsyncClient, question: Question) -> AsyncIterator[tuple[list[int], str]]:
    """Yield the pieces of one answer, token ids and text; ends only where the server said that it was whole."""
    whole = False
    async with client.stream("POST", "/v1/completions", json=question.body()) as response:
        if response.status_code != 200:
            await response.aread()
            raise BrokenAnswerError(f"{response.status_code}: {response.text[:200]}")
        async for line in response.aiter_lines():
            data = event_data(line)
            if data is None or data == DONE:
                continue
            event = json.loads(data)
            if "error" in event:
                raise BrokenAnswerError(str(event["error"].get("message", event["error"])))
            for choice in event["choices"]:
                whole = whole or choice["finish_reason"] == "length"
                yield choice.get("token_ids") or [], choice["text"]
    if not whole:
        raise BrokenAnswerError("the stream ended without saying that the answer was whole")
