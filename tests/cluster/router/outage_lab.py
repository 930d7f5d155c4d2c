"""Simulated replicas that a router loses and finds again, in virtual time: cuts, kills and what comes after."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from random import Random

import numpy as np

from cluster.errors import ApiError
from cluster.replica.core import ReplicaCore
from cluster.router.dispatcher import Dispatcher
from cluster.simulator.engine import simulated_tokens
from cluster.wire.link import LOST
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.simulator.cluster import SimulatedModel, simulated_replica
from tests.simulator.links import FaultyLink, connect_local

MODEL = SimulatedModel(num_kv_blocks=32768)
NOTICE = 0.1  # seconds after which Serve knows that a replica is dead
RELINK = 0.25  # seconds after which a router looks again for a replica that it lost


def asked(index: int, prompt: int, tokens: int) -> Request:
    """Return a request whose prompt begins like no other."""
    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
    return Request(f"r{index}", tuple(Random(index).choices(range(3, 9000), k=prompt)), params, seed=index)


def undisturbed(request: Request) -> list[int]:
    """Return the tokens that a request brings wherever it runs."""
    length, count = len(request.prompt_token_ids), request.params.max_tokens
    positions = np.arange(length, length + count)
    return simulated_tokens(np.full(count, request.seed), positions, MODEL.vocab_size - 3).tolist()


class OutageLab:
    """One router with default settings over replicas by name; a link that ends is made again unless it is cut off.

    poison: id of a request that kills every replica which computes it. revives: whether another one comes a second
    after a death.
    """

    def __init__(self, names: Iterable[str], poison: str | None = None, revives: bool = False) -> None:
        self.dispatcher = Dispatcher(None, Random(0))
        self._poison = poison
        self._revives = revives
        self.lost: list[tuple[str, str]] = []
        self.replicas: dict[str, ReplicaCore] = {}
        self._names = list(names)
        self._links: dict[str, FaultyLink] = {}
        self._all: list[tuple[ReplicaCore, FaultyLink]] = []
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> OutageLab:
        for name in self._names:
            await self.start(name)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.dispatcher.close()
        for replica, link in self._all:
            link.release()
            await replica.close()
            await link.wait_closed()

    async def start(self, name: str) -> None:
        """Start a replica under a new name and link up with it."""
        self.replicas[name] = replica = simulated_replica(name, MODEL)
        on_begin = replica.on_begin

        def begin(request_ids: list[str]) -> None:
            on_begin(request_ids)
            if any(request_id.startswith(f"{self._poison}@") for request_id in request_ids):
                asyncio.get_running_loop().call_later(0.001, self.kill, name)

        replica.on_begin = begin
        await self._link(name)

    def kill(self, name: str) -> None:
        """End a replica as kill -9 does: its connection breaks, nothing more is said, and Serve takes notice."""
        self.replicas.pop(name)
        self._links[name].cut(LOST, "killed")
        asyncio.get_running_loop().call_later(NOTICE, self.dispatcher.remove_replica, name)

    def cut(self) -> None:
        """Let nothing through between the router and all replicas; nothing is closed by that."""
        self._whole.clear()
        for link in self._links.values():
            link.hold()

    def heal(self) -> None:
        """Let everything through again, late words included."""
        self._whole.set()
        for _, link in self._all:
            link.release()

    def running(self) -> dict[str, int]:
        """Return how many requests each living replica runs."""
        return {name: replica.num_requests for name, replica in self.replicas.items()}

    async def answer(self, request: Request) -> str:
        """Run a request; return "whole", or the code of its error. Its tokens are compared in any case."""
        tokens: list[int] = []
        end = "whole"
        try:
            async for chunk in self.dispatcher.generate(request):
                tokens += chunk.token_ids
        except ApiError as error:
            end = error.code
        assert tokens == undisturbed(request)[: len(tokens)], "a token is not as it must be"
        assert end != "whole" or len(tokens) == request.params.max_tokens
        return end

    def ask(self, requests: Iterable[Request]) -> list[asyncio.Task[str]]:
        """Begin to run requests."""
        return [asyncio.create_task(self.answer(request)) for request in requests]

    async def _link(self, name: str) -> None:
        replica = self.replicas[name]
        inner = await connect_local(replica.serve, "router")
        link = FaultyLink(inner, on_close=lambda code: self._on_link_lost(name, code))
        self._links[name] = link
        self._all.append((replica, link))
        self.dispatcher.add_link(link)

    def _on_link_lost(self, name: str, code: str) -> None:
        self.lost.append((name, code))
        task = asyncio.create_task(self._find_again(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find_again(self, name: str) -> None:
        await asyncio.sleep(RELINK)
        await self._whole.wait()
        if name in self.replicas:
            await self._link(name)
        elif self._revives:
            await asyncio.sleep(1.0)
            await self.start(f"{name}'")
