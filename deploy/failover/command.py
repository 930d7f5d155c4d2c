"""`squadron demo-failover`: serves the demo model, keeps streams going, kills replicas, and counts what comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live

from cluster.app_config import AppConfig, parse_app
from cluster.config_values import GATEWAY
from deploy.cli.processes import SIGNALS, Interrupted, Interrupts
from deploy.failover.board import Board, StreamState, line, screen
from deploy.failover.killer import Killer
from deploy.failover.streams import Question, ask_again_and_again, record
from deploy.serve.command import Options, Server
from deploy.serve.output import without_death_notices

FRAMES = 8  # a second, on a terminal
LINE_SECONDS = 2.0  # between lines, elsewhere
REPLY = httpx.Timeout(60.0)


@dataclass(frozen=True, slots=True)
class FailoverOptions:
    """What to show. kills / seconds: when to stop; both None = at Ctrl-C. every: seconds between kills."""

    streams: int = 8
    replicas: int = 2
    tensor_parallel_size: int = 1
    tokens: int = 300
    kills: int | None = None
    seconds: float | None = None
    every: float = 5.0
    seed: int = 0
    verbose: bool = False

    def enough(self, board: Board) -> bool:
        """Whether there were the kills or the time that was asked for."""
        if self.kills is not None and len(board.kills) >= self.kills:
            return True
        return self.seconds is not None and time.monotonic() - board.began >= self.seconds


def demo_failover(options: FailoverOptions) -> int:
    """Run the demonstration and return its exit code: 0 only if replicas were killed and every answer was exact."""
    console = Console(highlight=False)
    quiet, settings = without_death_notices(), Options(verbose=options.verbose)
    with Interrupts() as interrupts, quiet, Server(_config(options), settings, interrupts) as server:
        show = Show(console, options)
        try:
            server.start()
            console.print("Recording what each stream answers while nothing is killed ...", style="dim")
            asyncio.run(_until_stopped(show.run(server.url)))
        except (Interrupted, asyncio.CancelledError):
            if not show.board.kills:
                console.print("Stopped before the first kill.", markup=False)
                if not server.ready:
                    raise
                return 1
    board = show.board
    console.print(board.summary(), style="bold green" if board.proven else "bold red", soft_wrap=True)
    return 0 if board.proven else 1


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, which the first signal cancels: an exception out of a signal handler would end one task alone."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    for number in SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    await task


def _config(options: FailoverOptions) -> AppConfig:
    return parse_app(
        {
            "model": "demo",
            "device": "cpu",
            "dtype": "float32",
            "ingress": GATEWAY,
            "port": 0,
            "replicas": options.replicas,
            "tensor_parallel_size": options.tensor_parallel_size,
            "kv_cache_memory_bytes": 64 * 2**20,
        }
    )


class Show:
    """The demonstration itself, against a server that runs."""

    def __init__(self, console: Console, options: FailoverOptions) -> None:
        self.board = Board([StreamState(number) for number in range(options.streams)], options.kills)
        self._console = console
        self._options = options

    async def run(self, url: str) -> None:
        """Record, stream, kill and show, until there was enough of it and the last stream has ended."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=REPLY, limits=limits, trust_env=False) as client:
            questions = [Question("demo", stream.number, self._options.tokens) for stream in self.board.streams]
            for stream, answer in zip(
                self.board.streams, await asyncio.gather(*(record(client, one) for one in questions)), strict=True
            ):
                stream.reference = answer
            self.board.began = time.monotonic()
            picture = asyncio.create_task(self._terminal() if self._console.is_terminal else self._lines())
            try:
                await self._stream_and_kill(client, questions)
            finally:
                picture.cancel()
                with suppress(asyncio.CancelledError):
                    await picture

    async def _stream_and_kill(self, client: httpx.AsyncClient, questions: list[Question]) -> None:
        options, stopping = self._options, asyncio.Event()
        clients = [
            asyncio.create_task(ask_again_and_again(client, question, stream, stopping))
            for question, stream in zip(questions, self.board.streams, strict=True)
        ]
        killer = Killer(self.board, client, options.replicas, options.every, Random(options.seed))
        try:
            await killer.run(options.enough)
            stopping.set()
            await asyncio.gather(*clients)
        finally:  # stopping the demonstration breaks no answer
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _terminal(self) -> None:
        def picture() -> None:
            live.update(screen(self.board, time.monotonic()), refresh=True)

        with Live(console=self._console, auto_refresh=False) as live:
            await _again_and_again(picture, 1 / FRAMES)

    async def _lines(self) -> None:
        told: set[str] = set()

        def news() -> None:
            for event in [event for event in self.board.events if event not in told]:
                told.add(event)
                self._console.print(event, markup=False, soft_wrap=True)

        def state() -> None:
            news()
            self._console.print(line(self.board, time.monotonic()), markup=False, soft_wrap=True)

        await asyncio.gather(_again_and_again(state, LINE_SECONDS), _again_and_again(news, 0.2))


async def _again_and_again(act: Callable[[], None], seconds: float) -> None:
    try:
        while True:
            act()
            await asyncio.sleep(seconds)
    finally:
        act()
