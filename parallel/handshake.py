"""Sockets between processes that share a secret: each proves to the other that it knows it, before anything is read.

The secret itself is never sent: who listens in, or stands behind a port that another process had, learns nothing that
opens a door. What follows is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import socket
import time

from parallel.errors import ChannelError, ChannelTimeout, RendezvousError
from parallel.packing import Buffer

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
