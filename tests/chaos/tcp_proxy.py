"""A network between router and replica that a test can delay, stop and cut, without any privilege."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class TcpProxy:
    """Forwards connections on a port of its own to `port` on loopback. Used on one event loop.

    `delay`: seconds added to every piece in each direction, order kept. `partition()` lets nothing through and closes
    nothing, as a cable that was pulled; `heal()` lets through what both sides had said meanwhile.
    """

    def __init__(self, port: int, delay: float = 0.0) -> None:
        self.delay = delay
        self._target = port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def partition(self) -> None:
        """Pull the cable."""
        self._flowing.clear()

    def heal(self) -> None:
        """Plug it in again."""
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        deliver = asyncio.create_task(self._deliver(due, sink))
        try:
            while data := await source.read(65536):
                due.put_nowait((loop.time() + self.delay, data))
            due.put_nowait((loop.time() + self.delay, b""))
            await deliver
        except OSError:
            deliver.cancel()
        finally:
            deliver.cancel()
            sink.close()

    async def _deliver(self, due: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            at, data = await due.get()
            await asyncio.sleep(max(0.0, at - loop.time()))
            await self._flowing.wait()
            if not data or sink.is_closing():
                return
            with suppress(OSError):
                sink.write(data)
                await sink.drain()
