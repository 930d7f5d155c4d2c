"""One long-lived stream of messages between a router and a replica, over whatever carries frames.

LinkError(SquadronError)
├── LinkRefusedError      no link was made: connection refused, wrong secret
│   └── OtherProtocolError   the replica speaks another version of the protocol, and will as long as it lives
├── LinkClosedError       the link is over; `code` says why
└── MessageTooLargeError  one message exceeds what a link carries; the link goes on
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from cluster.wire.codec import (
    DamagedMessageError,
    DamagedSubmitError,
    Down,
    Message,
    Up,
    decode_down,
    decode_up,
    encode,
)
from cluster.wire.replica_messages import Welcome
from cluster.wire.router_messages import Hello
from engine.errors import SquadronError

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)

# Why a link ended. Those in PEER_ALIVE were said by a peer in good health.
CLOSED = "closed"
DRAINED = "drained"
SLOW_CONSUMER = "slow_consumer"
REFUSED = "refused"
OTHER_PROTOCOL = "other_protocol"
DAMAGED = "damaged"
SUPERSEDED = "superseded"
SILENT = "silent"
ENGINE_DEAD = "engine_dead"
LOST = "lost"
STALLED = "stalled"
ENDS = (CLOSED, DRAINED, SLOW_CONSUMER, DAMAGED, SUPERSEDED, SILENT, ENGINE_DEAD, LOST, STALLED)
PEER_ALIVE = frozenset({CLOSED, DRAINED, SLOW_CONSUMER, DAMAGED, SUPERSEDED, SILENT})
# Those that may come again at once, and for ever: neither a death, nor a silence, nor an end in good order.
DETOURS = frozenset({CLOSED, SLOW_CONSUMER, DAMAGED})


class LinkError(SquadronError):
    """A link could not be made or is over."""


class LinkRefusedError(LinkError):
    """No link was made: the connection was refused, the secret is wrong, or as below."""


class OtherProtocolError(LinkRefusedError):
    """No link was made: the replica speaks another version of the protocol, and will as long as it lives."""


class LinkClosedError(LinkError):
    """The link is over. `code`: one of the constants of this module; `message`: a sentence."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message


class MessageTooLargeError(LinkError):
    """One message was not sent, because it exceeds `LinkLimits.max_message_bytes`. The link goes on."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of a link, in bytes: one message, and what may wait for a peer that does not take it.

    More waits on the way up: a burst of long prompts is no sign that the replica is slow.
    """

    max_message_bytes: int = 32 * 2**20
    max_up_bytes: int = 256 * 2**20
    max_down_bytes: int = 16 * 2**20


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where a replica listens and the secret that opens it. Handed to routers over a trusted way."""

    host: str
    port: int
    secret: str

    def __repr__(self) -> str:
        return f"LinkAddress(host={self.host!r}, port={self.port})"


@dataclass(frozen=True, slots=True)
class Announcement:
    """One replica: where its report stream listens, and what came up.

    phases: seconds that each phase of its start took. kv_tokens: tokens that its KV cache holds.
    engine: what serves, in a line (`engine.worker.executor_start.ModelInfo.words`).
    pids: process ids by rank, on their own nodes. vocabulary: `vocabulary_fingerprint` of its tokenizer; only
    a router of the same may send requests, since tokens mean something else elsewhere.
    """

    replica_id: str
    address: LinkAddress
    phases: dict[str, float]
    kv_tokens: int
    pids: tuple[int, ...]
    vocabulary: str = ""
    engine: str = ""

    def public(self) -> dict[str, Any]:
        """Return what may be shown to anyone who asks whether the service is ready."""
        return {
            "id": self.replica_id,
            "phases": {name: round(seconds, 3) for name, seconds in self.phases.items()},
            "kv_tokens": self.kv_tokens,
            "engine": self.engine,
            "pids": list(self.pids),
        }


class Link(ABC, Generic[Out, In]):
    """One end of a stream of messages, in order, without gaps, until it breaks. Used on one event loop.

    What is sent is buffered up to a bound of bytes. A peer that lets it fill up is cut off with `SLOW_CONSUMER`.
    """

    @abstractmethod
    def send(self, message: Out) -> None:
        """Queue `message` for the peer; never blocks.

        Raises `LinkClosedError` once the link is over and `MessageTooLargeError`.
        """

    @abstractmethod
    async def receive(self) -> In:
        """Return the next message, one caller at a time.

        Raises `LinkClosedError` when the link is over, as with bytes that are no message; and `DamagedSubmitError`
        for one submit that cannot be read, after which the link goes on.
        """

    @abstractmethod
    def close(self, code: str = CLOSED, message: str = "") -> None:
        """End the link; the peer gets the reason after what was sent, if it reads soon. Can be called twice."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the link is over for this end."""

    @abstractmethod
    async def wait_closed(self) -> None:
        """Return when the link is over and its resources are freed."""


class ReplicaLink(Link[Up, Down]):
    """The router's end. `welcome` is what the replica said of itself when the link was made."""

    welcome: Welcome

    @property
    def replica_id(self) -> str:
        """Name of the replica, unique among those that live."""
        return self.welcome.replica_id

    @property
    def incarnation(self) -> int:
        """Number of this life of the replica."""
        return self.welcome.incarnation


class RouterLink(Link[Down, Up]):
    """The replica's end. `hello` is what the router said of itself when the link was made."""

    hello: Hello

    @property
    def router_id(self) -> str:
        """Name of this life of the router."""
        return self.hello.router_id


class FrameTransport(Protocol):
    """What carries the messages of a link, each as one frame; the bounds and errors are those of `Link`."""

    over: asyncio.Event

    @property
    def closed(self) -> bool:
        """Whether this end is over."""

    def send(self, frame: bytes) -> None:
        """Queue a frame for the peer."""

    async def receive(self) -> bytes:
        """Return the next frame."""
        ...

    def close(self, code: str, message: str) -> None:
        """End the stream; the peer gets the reason after what was sent."""


class FrameLink(Link[Out, In]):
    """One end of a link over frames. `frames.over` is set when its resources are freed."""

    def __init__(self, frames: FrameTransport, decode: Callable[[bytes], In]) -> None:
        self.frames = frames
        self._decode = decode

    def send(self, message: Out) -> None:
        """Send the message as one frame."""
        self.frames.send(encode(message))

    async def receive(self) -> In:
        """Take the next frame and read it; the link is closed over one that cannot be read."""
        frame = await self.frames.receive()
        try:
            return self._decode(frame)
        except DamagedSubmitError:
            raise
        except DamagedMessageError as error:
            self.close(DAMAGED, str(error))
            raise LinkClosedError(DAMAGED, str(error)) from error

    def close(self, code: str = CLOSED, message: str = "") -> None:
        """Close the stream of frames."""
        self.frames.close(code, message)

    @property
    def closed(self) -> bool:
        """Whether this end of the stream is over."""
        return self.frames.closed

    async def wait_closed(self) -> None:
        """Wait until the stream's resources are freed."""
        await self.frames.over.wait()


class FrameReplicaLink(FrameLink[Up, Down], ReplicaLink):
    """The router's end over frames."""

    @classmethod
    async def welcomed(cls, frames: FrameTransport) -> FrameReplicaLink:
        """Return the link once the replica has said what it is. Raises `LinkRefusedError` and `LinkClosedError`."""
        link = cls(frames, decode_down)
        welcome = await link.receive()
        if not isinstance(welcome, Welcome):
            link.close(DAMAGED, "the first message must be a Welcome")
            raise LinkRefusedError(f"the replica's first message was a {type(welcome).__name__}, not a Welcome")
        link.welcome = welcome
        return link


class FrameRouterLink(FrameLink[Down, Up], RouterLink):
    """The replica's end over frames, to a router that has said who it is."""

    def __init__(self, frames: FrameTransport, hello: Hello) -> None:
        super().__init__(frames, decode_up)
        self.hello = hello


class FramePipe:
    """Frames in order; `put` never blocks, and closes the pipe when too many bytes wait.

    max_bytes: bound on what waits; max_frame: bound on one frame.
    """

    __slots__ = ("_ended", "_frames", "_max_bytes", "_max_frame", "_waiter", "_waiting_bytes")

    def __init__(self, max_bytes: int, max_frame: int) -> None:
        self._frames: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._max_bytes = max_bytes
        self._max_frame = max_frame
        self._waiter: asyncio.Future[None] | None = None
        self._ended: LinkClosedError | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be taken."""
        return self._waiting_bytes

    def put(self, frame: bytes) -> None:
        """Queue one frame. Raises `LinkClosedError` (also when it overflows) and `MessageTooLargeError`."""
        if self._ended is not None:
            raise LinkClosedError(self._ended.code, self._ended.message)
        if len(frame) > self._max_frame:
            raise MessageTooLargeError(f"a message of {len(frame)} bytes exceeds the link's {self._max_frame}")
        if self._waiting_bytes + len(frame) > self._max_bytes:
            message = f"more than {self._max_bytes} bytes wait for the peer"
            self.close(SLOW_CONSUMER, message, discard=True)
            raise LinkClosedError(SLOW_CONSUMER, message)
        self._frames.append(frame)
        self._waiting_bytes += len(frame)
        self._wake()

    async def get(self) -> bytes:
        """Return the next frame, one caller at a time. Raises `LinkClosedError` when closed and empty."""
        while not self._frames:
            if self._ended is not None:
                raise LinkClosedError(self._ended.code, self._ended.message)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        frame = self._frames.popleft()
        self._waiting_bytes -= len(frame)
        return frame

    def close(self, code: str, message: str = "", discard: bool = False) -> None:
        """End the pipe. What waits can still be taken unless it is discarded. The first reason stays."""
        if self._ended is None:
            self._ended = LinkClosedError(code, message)
        if discard:
            self._frames.clear()
            self._waiting_bytes = 0
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
