"""Streams that never pause: what every client gets while the app changes under it, against undisturbed answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.chaos.streams import WHOLE, Stream, client_of, greedy_or_seeded, read_all, read_stream
from tests.e2e.harness import App

Said = tuple[tuple[int, ...], str, str | None]


class Traffic:
    """`streams` clients at once, each with a question of its own that it asks again and again.

    pause: seconds between an answer and the next time, so that an update gets a share of a small machine too.
    """

    def __init__(self, app: App, streams: int, tokens: int = 300, pause: float = 0.5) -> None:
        self.ended: list[Stream] = []
        self._app = app
        self._asked = [greedy_or_seeded(index, tokens) for index in range(streams)]
        self._pause = pause
        self._live = 0
        self._stopping = False

    async def references(self) -> list[Said]:
        """Return each question's answer while nothing disturbs."""
        async with client_of(self._app.url) as client:
            client.headers.update(self._app.headers)
            streams = await read_all(client, self._asked)
        assert {stream.kind for stream in streams} == {WHOLE}, [stream.error for stream in streams]
        return [stream.said for stream in streams]

    async def during(self, change: Callable[[], Awaitable[object]]) -> None:
        """Run the clients while `change` happens; each asks once more when it is done, however fast that was."""
        async with client_of(self._app.url) as client:
            client.headers.update(self._app.headers)
            tasks = [asyncio.create_task(self._ask(client, asked)) for asked in self._asked]
            try:
                async with asyncio.timeout(60):
                    while self._live < len(tasks):
                        await asyncio.sleep(0.01)
                await change()
            finally:
                self._stopping = True
                await asyncio.gather(*tasks)

    def check(self, *allowed: list[Said]) -> None:
        """Fail unless every stream brought one of the allowed answers whole."""
        for stream in self.ended:
            assert stream.kind == WHOLE, f"{stream.kind} after {len(stream.tokens)} tokens: {stream.error}"
            assert not stream.faults, stream.faults
            index = self._asked.index(stream.asked)
            assert stream.said in [answers[index] for answers in allowed], "tokens differ from an undisturbed answer"

    async def _ask(self, client: httpx.AsyncClient, asked: dict[str, Any]) -> None:
        heard = False

        def first(_: Stream) -> None:
            nonlocal heard
            self._live += not heard
            heard = True

        last = False
        while not last:
            last = heard and self._stopping
            self.ended.append(await read_stream(client, asked, first))
            await asyncio.sleep(0 if self._stopping else self._pause)
