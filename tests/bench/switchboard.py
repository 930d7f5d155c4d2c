"""The links between routers and replicas, led through a process that can cut them as a pulled cable would.

The processes that Ray starts are given `reroute` as their setup hook and the switchboard's port in `PORT`: each link
that a router opens goes through a door of its own in this process. Nothing of the product knows of it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from cluster.wire import tcp
from cluster.wire.link import LinkAddress, LinkLimits, ReplicaLink
from tests.chaos.tcp_proxy import TcpProxy

PORT = "SQUADRON_TEST_SWITCHBOARD"
HOST = "127.0.0.1"


class Switchboard:
    """A door for each (router process, replica's port), in a thread of its own: `with Switchboard() as board:`."""

    def __init__(self) -> None:
        self._doors: dict[tuple[int, int], TcpProxy] = {}
        self._cut: set[int] = set()
        self._started: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="switchboard", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = self._started.result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    @property
    def runtime_env(self) -> dict[str, Any]:
        """What Ray must start its processes with."""
        return {"worker_process_setup_hook": reroute, "env_vars": {PORT: str(self.port)}}

    def cut(self, router: int) -> None:
        """Let nothing through between a router's process and all replicas, and close nothing."""
        self._call(lambda: self._set(router, cut=True))

    def heal(self, router: int) -> None:
        """Let everything through again, with what both sides said meanwhile."""
        self._call(lambda: self._set(router, cut=False))

    def num_doors(self, router: int) -> int:
        """Return how many replicas a router has reached through this."""
        return sum(pid == router for pid, _ in self._doors)

    def _call(self, act: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def run() -> None:
            act()
            done.set_result(None)

        self._loop.call_soon_threadsafe(run)
        done.result(10)

    def _set(self, router: int, cut: bool) -> None:
        (self._cut.add if cut else self._cut.discard)(router)
        for (pid, _), door in self._doors.items():
            if pid == router:
                (door.partition if cut else door.heal)()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as self._open:
            server = await asyncio.start_server(self._answer, HOST, 0)
            self._started.set_result(server.sockets[0].getsockname()[1])
            await self._over.wait()
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell a router the door to a replica: a line with its process and the replica's port, answered by a port."""
        pid, port = map(int, (await reader.readline()).split())
        if (pid, port) not in self._doors:
            door = await self._open.enter_async_context(TcpProxy(port))
            self._doors[pid, port] = door
            if pid in self._cut:
                door.partition()
        writer.write(f"{self._doors[pid, port].port}\n".encode())
        writer.close()


def reroute() -> None:
    """Have every link that this process opens from now on go through the switchboard (a setup hook of Ray's)."""
    straight, board = tcp.connect, int(os.environ[PORT])

    async def connect(address: LinkAddress, router_id: str, limits: LinkLimits | None = None) -> ReplicaLink:
        reader, writer = await asyncio.open_connection(HOST, board)
        writer.write(f"{os.getpid()} {address.port}\n".encode())
        port = int(await reader.readline())
        writer.close()
        return await straight(replace(address, port=port), router_id, limits)

    tcp.connect = connect
