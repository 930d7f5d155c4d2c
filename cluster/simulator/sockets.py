"""TCP between simulated processes: bytes keep their order and take time; where a way breaks they end anywhere.

The product's own streams of frames run over these (`cluster.wire.frames`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from cluster.simulator.network import LATENCY, NOBODY, REFUSAL, Network, Way
from cluster.simulator.process import PROCESS, SimulatedProcess

SEGMENT = 48  # bytes that arrive at a time where a way is slow: it is a narrow one
WINDOW = 1 << 18  # bytes that were written and not read, beyond which the writer is to wait
MakeProtocol = Callable[[], asyncio.Protocol]


class Sockets:
    """What listens, by its port, and connections to it (`SimulatedLoop.sockets`)."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._listening: dict[int, tuple[SimulatedProcess, MakeProtocol]] = {}
        self._ports = 0

    def listen(self, make: MakeProtocol) -> SimpleNamespace:
        """Take connections in the process that asks; return what is used of an `asyncio.Server`."""
        self._ports += 1
        port = self._ports
        self._listening[port] = _here(), make
        socket = SimpleNamespace(getsockname=lambda: ("", port))
        return SimpleNamespace(sockets=[socket], close=lambda: self._listening.pop(port, None))

    async def connect(self, make: MakeProtocol, port: int) -> None:
        """Connect the process that asks. Raises `OSError`."""
        caller, (host, serve) = _here(), self._listening[port]
        way, loop = self._network.way(caller.name, host.name), self._network.loop
        await asyncio.sleep(LATENCY)
        if way.blocked > loop.now:
            await asyncio.sleep(min(REFUSAL, way.blocked - loop.now))
            if way.blocked > loop.now:
                raise TimeoutError("nobody answers")
        if host.dead or port not in self._listening:
            raise ConnectionRefusedError("connection refused")
        near, far = TcpConnection(self._network, way, caller, host).sockets
        loop.call_soon(far.open, serve, context=host.context.copy())
        near.open(make)


class TcpConnection:
    """Two sockets, each of a process, on one way."""

    is_quiet = False

    def __init__(self, network: Network, way: Way, caller: SimulatedProcess, host: SimulatedProcess) -> None:
        self.ends = caller, host
        self.sockets = near, far = Socket(network, way, caller), Socket(network, way, host)
        near.peer, far.peer = far, near
        way.connections.append(self)
        self._way = way

    def broke(self) -> None:
        """End both directions; of what is on its way some has come."""
        for one in self.sockets:
            one.broke()
        self._way.connections.remove(self)

    def lost(self, process: SimulatedProcess, silently: bool) -> None:
        """End it with a process that died: what it had written comes, then the end of it. silently: nothing does."""
        self.sockets[self.ends.index(process)].left(silently)
        self._way.connections.remove(self)


class Socket(asyncio.Transport):
    """One end of a connection."""

    peer: Socket

    def __init__(self, network: Network, way: Way, process: SimulatedProcess) -> None:
        super().__init__()
        self._network = network
        self._way = way
        self._process = process
        self._protocol: asyncio.Protocol | None = None
        self._flight: deque[tuple[float, bytes]] = deque()  # when each comes to the other end; b"" = the end
        self._last = 0.0  # when the last of it does
        self._unread = bytearray()  # that came
        self._outside = 0  # bytes that were written and that the other end has not read
        self._reads = True
        self._full = self._closing = self._over = False

    def open(self, make: MakeProtocol) -> None:
        """Give it to a protocol, in the process that has it."""
        self._protocol = make()
        self._protocol.connection_made(self)
        self._read()

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return SimpleNamespace(setsockopt=lambda *_: None) if name == "socket" else default

    @override
    def is_closing(self) -> bool:
        return self._closing

    @override
    def write(self, data: Any) -> None:
        if self._closing:
            return
        self._put(bytes(data))
        self._outside += len(data)
        if self._outside > WINDOW and not self._full and self._protocol is not None:
            self._full = True
            self._protocol.pause_writing()

    @override
    def pause_reading(self) -> None:
        self._reads = False

    @override
    def resume_reading(self) -> None:
        self._reads = True
        self._soon(self._read)

    @override
    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._put(b"")
            self._soon(self._lost, None)

    @override
    def abort(self) -> None:
        self.close()

    def broke(self) -> None:
        """Hear that the connection broke; half of what was on its way to the other end had come."""
        flight, self._flight = b"".join(data for _, data in self._flight), deque()
        self.peer.arrive(flight[: len(flight) // 2])
        self._closing = True
        self._soon(self._lost, ConnectionResetError("the connection broke"))

    def left(self, silently: bool) -> None:
        """End with its process."""
        self._closing = self._over = True
        if silently:
            self._flight.clear()
        else:
            self._put(b"")

    def arrive(self, data: bytes) -> None:
        """Have bytes here, which are read when the process gets to it."""
        self._unread += data
        self._soon(self._read)

    def hear_end(self) -> None:
        """Have the end of what the other end writes here."""
        self._soon(self._ends)

    def taken(self, size: int) -> None:
        """Take note of what the other end has read."""
        self._outside -= size
        if self._full and self._outside < WINDOW // 4:
            self._full = False
            self._soon(self._resume)

    def _resume(self) -> None:
        if self._protocol is not None and not self._over:
            self._protocol.resume_writing()

    def _read(self) -> None:
        if self._protocol is None or not self._reads or self._over or not self._unread:
            return
        data = bytes(self._unread)
        self._unread.clear()
        self.peer.taken(len(data))
        self._protocol.data_received(data)

    def _ends(self) -> None:
        self._read()
        self.close()

    def _lost(self, error: Exception | None) -> None:
        if not self._over and self._protocol is not None:
            self._over = True
            self._protocol.connection_lost(error)

    def _soon(self, do: Callable[..., None], *args: Any) -> None:
        """Have this end's process do something, once it gets to it."""
        self._network.loop.call_soon(do, *args, context=self._process.context.copy())

    def _put(self, data: bytes) -> None:
        """Have bytes arrive at the other end, behind what was sent before."""
        way, now = self._way, self._network.loop.now
        is_first = not self._flight
        step = len(data) if now >= way.slow else SEGMENT
        self._last = max(self._last, now + LATENCY)
        for at in range(0, max(len(data), 1), max(step, 1)):
            self._last += way.delay if self._last < way.slow else 0.0
            self._flight.append((self._last, data[at : at + step]))
        if is_first:
            self._wait(self._flight[0][0] - now)

    def _wait(self, seconds: float) -> None:
        self._network.loop.call_later(seconds, self._deliver, context=NOBODY)

    def _deliver(self) -> None:
        flight, way, now = self._flight, self._way, self._network.loop.now
        if way.blocked > now and flight:
            self._wait(way.blocked - now)
            return
        while flight and flight[0][0] <= now:
            _, data = flight.popleft()
            if data:
                self.peer.arrive(data)
            else:
                self.peer.hear_end()
        if flight:
            self._wait(flight[0][0] - now)


def _here() -> SimulatedProcess:
    process = PROCESS.get()
    if process is None:
        raise RuntimeError("sockets are of simulated processes")
    return process
