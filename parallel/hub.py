"""Rank 0's side of a rendezvous: a port that opens to those who know the group's secret, notes, and who has come.

Each end of a connection proves to the other that it knows the secret, before anything is read. The secret itself is
never sent: who listens in, or stands behind a port that another process had, learns nothing that opens a door. What
follows is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress

from parallel.channel import Buffer
from parallel.errors import ChannelError, ChannelTimeout, RendezvousError

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
MAX_FRAME = 1 << 20  # bytes
_HELLO = b"squadron group 1"
_NONCE = 32  # bytes
_PROOF = hashlib.sha256().digest_size
_LENGTH = 4  # bytes of the length before a frame


def receive_into(connection: socket.socket, memory: Buffer, deadline: float) -> None:
    """Fill `memory` with what comes. deadline: of `time.monotonic`, infinity to wait as long as the peer lives.

    Raises `ChannelTimeout` at the deadline, `ChannelError` when the peer is gone.
    """
    view = memoryview(memory).cast("B")
    try:
        while len(view):
            connection.settimeout(_left(deadline))
            count = connection.recv_into(view)
            if not count:
                raise ChannelError("the connection was closed")
            view = view[count:]
    except TimeoutError as error:
        raise ChannelTimeout("nothing came by the deadline") from error
    except OSError as error:
        raise ChannelError(f"the connection broke: {error}") from error


def send_all(connection: socket.socket, data: Buffer, deadline: float) -> None:
    """Send all of `data`. Raises like `receive_into`."""
    try:
        connection.settimeout(_left(deadline))
        connection.sendall(data)
    except TimeoutError as error:
        raise ChannelTimeout("the peer took nothing by the deadline") from error
    except OSError as error:
        raise ChannelError(f"the connection broke: {error}") from error


def send_frame(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Send `data` with its length before it. Raises like `receive_into`."""
    send_all(connection, len(data).to_bytes(_LENGTH, "big") + data, deadline)


def receive_frame(connection: socket.socket, deadline: float) -> bytes:
    """Return what the peer sent with `send_frame`, `MAX_FRAME` bytes at most. Raises like `receive_into`."""
    length = bytearray(_LENGTH)
    receive_into(connection, length, deadline)
    size = int.from_bytes(length, "big")
    if size > MAX_FRAME:
        raise ChannelError(f"a frame of {size} bytes is longer than {MAX_FRAME}")
    data = bytearray(size)
    receive_into(connection, data, deadline)
    return bytes(data)


def let_in(connection: socket.socket, secret: bytes, deadline: float) -> None:
    """Be the end that was called. Raises `RendezvousError` for a caller who does not know `secret`."""
    ours = secrets.token_bytes(_NONCE)
    answer = bytearray(_NONCE + _PROOF)
    send_all(connection, _HELLO + ours, deadline)
    receive_into(connection, answer, deadline)
    theirs, proof = bytes(answer[:_NONCE]), bytes(answer[_NONCE:])
    if not hmac.compare_digest(proof, _proof(secret, b"caller", ours, theirs)):
        raise RendezvousError("a caller does not know the group's secret")
    send_all(connection, _proof(secret, b"called", ours, theirs), deadline)


def introduce(connection: socket.socket, secret: bytes, deadline: float) -> None:
    """Be the end that calls. Raises `RendezvousError` when the other end does not know `secret`, or hangs up."""
    hello = bytearray(len(_HELLO) + _NONCE)
    proof = bytearray(_PROOF)
    try:
        receive_into(connection, hello, deadline)
        if not hello.startswith(_HELLO):
            raise RendezvousError("what answers is not rank 0")
        theirs, ours = bytes(hello[len(_HELLO) :]), secrets.token_bytes(_NONCE)
        send_all(connection, ours + _proof(secret, b"caller", theirs, ours), deadline)
        receive_into(connection, proof, deadline)
    except ChannelError as error:
        raise RendezvousError(f"what answers does not know the group's secret, or is gone: {error}") from error
    if not hmac.compare_digest(bytes(proof), _proof(secret, b"called", theirs, ours)):
        raise RendezvousError("what answers does not know the group's secret")


def set_options(connection: socket.socket) -> None:
    """Have small messages go at once, and a host that vanished be noticed in the end."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _proof(secret: bytes, role: bytes, called: bytes, caller: bytes) -> bytes:
    # The role keeps an answer from being played back to who gave it.
    return hmac.digest(secret, role + called + caller, "sha256")


def _left(deadline: float) -> float | None:
    if math.isinf(deadline):
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


PROOF_TIMEOUT = 5.0  # seconds that a caller has to prove who it is and to say what it wants
MOST_UNKNOWN = 64  # callers who have not proven anything yet; beyond that, who came first has had its time
_STRANGER = "a caller at the rendezvous was turned away: %s"
_LOOK = 1.0  # seconds between looks whether the door is closed, where that does not wake who waits at it


class Hub:
    """Takes callers at `listener`, which it owns, in threads of its own until it is closed.

    A caller says what it wants in a first frame: `["notes"]`, to read and write notes; or `["group", name, rank]`, to
    be that rank of the group of that name, for which its connection is then used.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._notes: dict[str, str] = {}
        self._members: dict[tuple[str, int], socket.socket] = {}  # by group and rank, until they are taken
        self._unknown: OrderedDict[socket.socket, None] = OrderedDict()
        self._known: set[socket.socket] = set()  # who read and write notes
        self._hosts: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._closed = False
        self._turned_away = False
        listener.settimeout(_LOOK)
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    @property
    def hosts(self) -> frozenset[str]:
        """Addresses that those who know the secret have called from."""
        return self._hosts

    def set(self, key: str, value: str) -> None:
        """Write a note."""
        with self._changed:
            self._notes[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> str | None:
        """Return a note once it is there; None after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or key in self._notes, timeout)
            return self._notes.get(key)

    def check(self, key: str) -> bool:
        """Whether a note is there."""
        with self._changed:
            return key in self._notes

    def members(self, group: str, size: int, timeout: float) -> list[socket.socket]:
        """Return the connections of ranks 1 to `size - 1` of a group once all have come.

        Raises `RendezvousError` naming those who have not within `timeout` seconds.
        """
        wanted = [(group, rank) for rank in range(1, size)]
        with self._changed:
            here = self._changed.wait_for(lambda: self._closed or self._members.keys() >= set(wanted), timeout)
            missing = [str(rank) for _, rank in wanted if (group, rank) not in self._members]
            if missing or not here:
                raise RendezvousError(f"ranks {', '.join(missing)} have not come")
            return [self._members.pop(key) for key in wanted]

    def close(self) -> None:
        """Close the door, and the connections that no group has taken. Can be called twice."""
        with self._changed:
            self._closed = True
            waiting = list(self._members.values())
            connections = [*waiting, *self._unknown, *self._known]
            self._members.clear()
            self._changed.notify_all()
        for connection in (self._listener, *connections):
            _shut(connection)  # which wakes the threads that close the others
        for connection in (self._listener, *waiting):
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closed:  # out of file descriptors, say: callers wait meanwhile
                    logger.warning("a rank could not be taken in: %s", error)
                    time.sleep(_LOOK)
                continue
            with self._changed:
                self._unknown[connection] = None
                while len(self._unknown) > MOST_UNKNOWN:
                    _shut(self._unknown.popitem(last=False)[0])
            threading.Thread(target=self._meet, args=(connection,), name="rendezvous-caller", daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + PROOF_TIMEOUT
        try:
            set_options(connection)
            let_in(connection, self._secret, deadline)
            wanted = json.loads(receive_frame(connection, deadline))
            host = connection.getpeername()[0]
        except (ChannelError, RendezvousError, OSError, ValueError) as error:
            # One line for all of them: strangers must not fill the log.
            logger.log(logging.DEBUG if self._turned_away else logging.WARNING, _STRANGER, error)
            self._turned_away = True
            wanted = None
        with self._changed:
            self._unknown.pop(connection, None)
            if self._closed or wanted is None:
                connection.close()
                return
            self._hosts |= {host}
            if wanted[0] == "group":
                self._join(connection, str(wanted[1]), int(wanted[2]))
                return
            self._known.add(connection)
        try:
            self._serve_notes(connection)
        finally:
            with self._changed:
                self._known.discard(connection)
            connection.close()

    def _join(self, connection: socket.socket, group: str, rank: int) -> None:
        if (group, rank) in self._members:
            logger.warning("rank %d of the group %r came twice; the second is turned away", rank, group)
            connection.close()
            return
        self._members[group, rank] = connection
        self._changed.notify_all()

    def _serve_notes(self, connection: socket.socket) -> None:
        with suppress(ChannelError):  # it has what it came for
            while True:
                verb, key, *rest = json.loads(receive_frame(connection, math.inf))
                answer: str | bool | None = None
                if verb == "set":
                    self.set(key, rest[0])
                elif verb == "get":
                    answer = self.get(key, rest[0])
                else:
                    answer = self.check(key)
                send_frame(connection, json.dumps(answer).encode(), math.inf)


def _shut(connection: socket.socket) -> None:
    """Wake those who wait on a socket: closing alone does not."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
