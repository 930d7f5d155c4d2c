"""Connections between simulated processes: frames take time, and ways between processes can be slow, cut or closed.

On one connection frames stay in order, as TCP keeps them; two connections may reorder what they carry.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.simulator.process import SimulatedLoop, SimulatedProcess
from cluster.wire.frames import LINGER
from cluster.wire.link import (
    LOST,
    FramePipe,
    FrameReplicaLink,
    FrameRouterLink,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    ReplicaLink,
    RouterLink,
)
from cluster.wire.router_messages import Hello

LATENCY = 0.0005  # seconds
NOBODY = Context()  # what carries frames is no process: it goes on when both ends have stopped
REFUSAL = 5.0  # seconds after which a connection that nobody answers is given up
LIMITS = LinkLimits()
Serve = Callable[[RouterLink], Coroutine[Any, Any, None]]


class Carrier(Protocol):
    """A connection. ends: its processes. is_quiet: both ends are open, and nothing is on its way or unread."""

    ends: tuple[SimulatedProcess, SimulatedProcess]

    @property
    def is_quiet(self) -> bool:
        """See above."""
        ...

    def broke(self) -> None:
        """End both directions; what is on its way is lost."""

    def lost(self, process: SimulatedProcess, silently: bool) -> None:
        """End with a process that died."""


@dataclass
class Way:
    """What lies between two processes. blocked: until when nothing gets through. delay: of frames, until `slow`."""

    blocked: float = 0.0
    slow: float = 0.0
    delay: float = 0.0
    connections: list[Carrier] = field(default_factory=list)


class Network:
    """All ways between processes, by their names. carried: frames so far."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.carried = 0
        self._ways: dict[tuple[str, str], Way] = {}

    @property
    def open_from(self) -> float:
        """When no way is blocked any more."""
        return max((way.blocked for way in self._ways.values()), default=0.0)

    def way(self, one: str, other: str) -> Way:
        """Return the way between two processes, either way round."""
        return self._ways.setdefault((one, other) if one < other else (other, one), Way())

    def cut(self, one: str, other: str) -> None:
        """Break the connections between two processes; both hear of it."""
        for connection in list(self.way(one, other).connections):
            connection.broke()

    def partition(self, one: str, other: str, seconds: float) -> None:
        """Let nothing through for a while; then all that was held back comes."""
        way = self.way(one, other)
        way.blocked = max(way.blocked, self.loop.now + seconds)

    def slow(self, one: str, other: str, delay: float, seconds: float) -> None:
        """Make each frame so much later for a while."""
        way = self.way(one, other)
        way.delay, way.slow = delay, self.loop.now + seconds

    def died(self, process: SimulatedProcess, silently: bool) -> None:
        """Have the peers of a dead process hear of its end. silently: not those whose peer's machine is gone, too."""
        for way in self._ways.values():
            for connection in list(way.connections):
                if process in connection.ends:
                    connection.lost(process, silently)

    async def connect(
        self,
        router: SimulatedProcess,
        replica: SimulatedProcess,
        serve: Serve,
        router_id: str,
        ways: tuple[str, str],
    ) -> ReplicaLink:
        """Open a link, in the router's process. ways: names of the places of both. Raises `LinkRefusedError`."""
        way = self.way(*ways)
        await asyncio.sleep(LATENCY)
        if way.blocked > self.loop.now:
            await asyncio.sleep(min(REFUSAL, way.blocked - self.loop.now))
            if way.blocked > self.loop.now:
                raise LinkRefusedError("nobody answers")
        if replica.dead:
            raise LinkRefusedError("connection refused")
        connection = Connection(self, way, router, replica)
        replica.spawn(serve(FrameRouterLink(connection.replicas_end, Hello(router_id))))
        try:
            async with asyncio.timeout(REFUSAL):
                return await FrameReplicaLink.welcomed(connection.routers_end)
        except LinkClosedError as error:
            raise LinkRefusedError(f"the replica refused the link: {error}") from error
        except TimeoutError:
            connection.routers_end.close(LOST, "no welcome")
            raise LinkRefusedError("no welcome came in time") from None


class Connection:
    """Two ends, each of a process, on one way."""

    def __init__(self, network: Network, way: Way, router: SimulatedProcess, replica: SimulatedProcess) -> None:
        self.network = network
        self.way = way
        self.ends = (router, replica)
        self.routers_end = End(self, LIMITS.max_down_bytes)
        self.replicas_end = End(self, LIMITS.max_up_bytes)
        self.routers_end.peer, self.replicas_end.peer = self.replicas_end, self.routers_end
        way.connections.append(self)

    @property
    def is_quiet(self) -> bool:
        """Whether both ends are open, and nothing is on its way or waits to be read."""
        return all(end.is_quiet and not end.closed for end in (self.routers_end, self.replicas_end))

    def broke(self) -> None:
        """End both directions; what is on its way is lost."""
        for end in (self.routers_end, self.replicas_end):
            end.broke()
        self.over()

    def lost(self, process: SimulatedProcess, silently: bool) -> None:
        """End the connection of a process that died."""
        mine = self.routers_end if process is self.ends[0] else self.replicas_end
        if not mine.closed:
            mine.abandon(silently)
        self.over()

    def over(self) -> None:
        """Keep no account of it once both ends are closed."""
        if self.routers_end.closed and self.replicas_end.closed and self in self.way.connections:
            self.way.connections.remove(self)


class End:
    """One end of a connection (`FrameTransport`)."""

    peer: End

    def __init__(self, connection: Connection, max_bytes: int) -> None:
        self.over = asyncio.Event()
        self._connection = connection
        self._network = connection.network
        self._inbox = FramePipe(max_bytes, LIMITS.max_message_bytes)
        self._ended: LinkClosedError | None = None
        self._last = 0.0  # when the frame sent last arrives
        self._flight: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()
        self._gone = False  # its process is dead, or the connection broke: nothing of it arrives any more

    @property
    def closed(self) -> bool:
        """Whether this end is over."""
        return self._ended is not None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that was sent here is unread, and nothing sent from here is on its way."""
        return not self._flight and not self._inbox.waiting_bytes

    def send(self, frame: bytes) -> None:
        """Send a frame."""
        if self._ended is not None:
            raise LinkClosedError(self._ended.code, self._ended.message)
        self._network.carried += 1
        self._put(self.peer.arrive, frame)

    async def receive(self) -> bytes:
        """Return the next frame."""
        return await self._inbox.get()

    def close(self, code: str, message: str = "") -> None:
        """Say goodbye, after what was sent."""
        if self._ended is not None:
            return
        self._ended = LinkClosedError(code, message)
        self._inbox.close(code, message, discard=True)
        self._put(self.peer.hear_goodbye, code, message)
        self._network.loop.call_later(LINGER, self._reset, context=NOBODY)
        self.over.set()
        self._connection.over()

    def _reset(self) -> None:
        """Lose what did not arrive in time after this end closed."""
        if self._flight and not self._gone:
            self._flight.clear()
            self._put(self.peer.hear_goodbye, LOST, "the connection was reset")

    def arrive(self, frame: bytes) -> None:
        """Take in a frame."""
        if self._ended is None:
            try:
                self._inbox.put(frame)
            except LinkClosedError as error:
                self.close(error.code, error.message)

    def hear_goodbye(self, code: str, message: str) -> None:
        """Take note that the other end has closed, or is gone."""
        if self._ended is None:
            self._ended = LinkClosedError(code, message)
            self._inbox.close(code, message)
            self.over.set()
            self._connection.over()

    def broke(self) -> None:
        """End at once."""
        self._gone = True
        self.hear_goodbye(LOST, "the connection broke")

    def abandon(self, silently: bool) -> None:
        """End with the process: the kernel says so to the other end, if the machine lives."""
        self._ended = LinkClosedError(LOST, "this process is dead")
        if silently:
            self._gone = True
        else:
            self._put(self.peer.hear_goodbye, LOST, "the other process is gone")

    def _put(self, deliver: Callable[..., None], *args: Any) -> None:
        """Have something arrive at the other end, behind what was sent before."""
        way, now = self._connection.way, self._network.loop.now
        self._last = max(self._last, now + LATENCY + (way.delay if now < way.slow else 0.0))
        self._flight.append((self._last, deliver, args))
        if len(self._flight) == 1:
            self._wait(self._last - now)

    def _wait(self, seconds: float) -> None:
        self._network.loop.call_later(seconds, self._deliver, context=NOBODY)

    def _deliver(self) -> None:
        flight, way, now = self._flight, self._connection.way, self._network.loop.now
        if self._gone:
            flight.clear()
        elif way.blocked > now:
            self._wait(way.blocked - now)
            return
        while flight and flight[0][0] <= now:
            _, deliver, args = flight.popleft()
            deliver(*args)
        if flight:
            self._wait(flight[0][0] - now)
