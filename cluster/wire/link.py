"""One long-lived stream between a router and a replica: the interface that every transport implements.

LinkError(SquadronError)
├── LinkRefusedError      no link was made: nobody there, wrong secret
│   └── OtherProtocolError   the replica speaks another version of the protocol, and will as long as it lives
├── LinkClosedError       the link is over; `code` says why
└── MessageTooLargeError  one message exceeds what a link carries; the link goes on
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.wire.messages import Down, Hello, Message, Up, Welcome
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
    """No link was made: nobody listens, the secret is wrong, or as below."""


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
        """End the link and tell the peer why, after what was sent, if it takes it soon. Can be called twice."""

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
