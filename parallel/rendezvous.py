"""Where the ranks of a group find each other: at a port of rank 0 that opens to those who know the group's secret."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Self

from parallel.errors import ChannelError, RendezvousError
from parallel.hub import PROOF_TIMEOUT, SECRET_BYTES, Hub, introduce, receive_frame, send_frame, set_options

_GRACE = 5.0  # seconds that an answer may take beyond what was to be waited for


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Where rank 0 is, and the secret that it opens to: handed to the other ranks over a way that is trusted.

    Raises `RendezvousError` for what cannot be called.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not self.host or not 0 < self.port < 65536 or len(self.secret) != SECRET_BYTES:
            raise RendezvousError(
                f"rendezvous address {self} needs a host, a port from 1 to 65535 such as 127.0.0.1:29500, and a "
                f"secret of {SECRET_BYTES} bytes"
            )

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Rendezvous:
    """Notes for forming groups, and the connections that make one.

    `Rendezvous.create` opens one (rank 0, which hands `address` to the others), `Rendezvous.join` connects to it.
    Keep it until the groups are formed. Listens on one interface only, and only to those who know the secret.
    """

    def __init__(self, address: RendezvousAddress, notes: Hub | _Caller) -> None:
        self.address = address
        self._notes = notes
        self._end = weakref.finalize(self, notes.close)

    @classmethod
    def create(cls, host: str = "127.0.0.1") -> Rendezvous:
        """Listen at a free port of `host`, an address of this machine that the other ranks can reach.

        Raises `RendezvousError` when this machine has no such address.
        """
        try:
            family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(where[:2], family=family, backlog=128)
        except OSError as error:
            raise RendezvousError(
                f"cannot listen on {host!r} ({error}); give an address of this machine such as 127.0.0.1"
            ) from error
        address = RendezvousAddress(host, listener.getsockname()[1], secrets.token_bytes(SECRET_BYTES))
        return cls(address, Hub(listener, address.secret))

    @classmethod
    def join(cls, address: RendezvousAddress, timeout: float) -> Rendezvous:
        """Connect to rank 0 at `address`; it need not listen yet.

        Raises `RendezvousError` when it does not answer within `timeout` seconds, or does not know the secret.
        """
        return cls(address, _Caller(_call(address, ["notes"], timeout)))

    def close(self) -> None:
        """Stop listening, or disconnect; groups that are formed go on. Can be called twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def store(self, name: str, timeout: float) -> Notes:
        """Return the notes of the group called `name`; its waits last `timeout` seconds at most."""
        self._require_open()
        return Notes(name, self._notes, timeout)

    @property
    def hosts(self) -> frozenset[str]:
        """Addresses that ranks have called from, where this is rank 0's."""
        return self._notes.hosts

    def connections(self, group: str, rank: int, size: int, timeout: float) -> list[socket.socket]:
        """Return what connects this rank with the group: rank 0 with ranks 1, 2, ..., any other with rank 0 alone.

        Rank 0 is the one that created the rendezvous. Raises `RendezvousError` for those who have not come in time.
        """
        self._require_open()
        if (rank == 0) != isinstance(self._notes, Hub):
            raise RendezvousError(f"rank 0 creates the rendezvous and the others join it; this is rank {rank}")
        if isinstance(self._notes, Hub):
            return self._notes.members(group, size, timeout)
        return [_call(self.address, ["group", group, rank], timeout)]

    def _require_open(self) -> None:
        if not self._end.alive:
            raise RendezvousError(f"the rendezvous at {self.address} is closed")


class Notes:
    """Texts that the ranks of a group leave each other."""

    def __init__(self, name: str, notes: Hub | _Caller, timeout: float) -> None:
        self._name = name
        self._notes = notes
        self._timeout = timeout

    def set(self, key: str, value: str) -> None:
        """Write a note, in place of the former one of this key."""
        self._notes.set(f"{self._name}/{key}", value)

    def get(self, key: str) -> str:
        """Return a note, once somebody has written it. Raises `RendezvousError` when it does not come in time."""
        value = self._notes.get(f"{self._name}/{key}", self._timeout)
        if value is None:
            raise RendezvousError(f"no rank left the note {key!r} of {self._name!r} within {self._timeout:g} s")
        return value

    def check(self, key: str) -> bool:
        """Whether a note is there."""
        return self._notes.check(f"{self._name}/{key}")


class _Caller:
    """Reads and writes the hub's notes over a connection, one wish at a time."""

    hosts: frozenset[str] = frozenset()

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._ask(["set", key, value], 0.0)

    def get(self, key: str, timeout: float) -> str | None:
        answer = self._ask(["get", key, timeout], timeout)
        return None if answer is None else str(answer)

    def check(self, key: str) -> bool:
        return bool(self._ask(["check", key], 0.0))

    def close(self) -> None:
        self._connection.close()

    def _ask(self, wish: list[str | float], seconds: float) -> object:
        with self._lock:
            try:
                send_frame(self._connection, json.dumps(wish).encode(), time.monotonic() + _GRACE)
                answer = receive_frame(self._connection, time.monotonic() + seconds + _GRACE)
            except ChannelError as error:
                raise RendezvousError(f"rank 0 of the group is gone or does not answer: {error}") from error
        return json.loads(answer)


def _call(address: RendezvousAddress, wish: list[str | int], timeout: float) -> socket.socket:
    """Return a connection to rank 0, each end of which has proven itself, and over which `wish` was said."""
    connection = _connected(address, time.monotonic() + timeout, timeout)
    deadline = time.monotonic() + min(max(timeout, 1.0), PROOF_TIMEOUT)
    try:
        set_options(connection)
        introduce(connection, address.secret, deadline)
        send_frame(connection, json.dumps(wish).encode(), deadline)
    except ChannelError as error:
        connection.close()
        raise RendezvousError(f"rank 0 at {address} is gone: {error}") from error
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _connected(address: RendezvousAddress, deadline: float, timeout: float) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((address.host, address.port), timeout=max(left, 0.001))
        except OSError as error:
            if left <= 0:
                raise RendezvousError(f"no rank 0 answers at {address} after {timeout:g} s: {error}") from error
            time.sleep(min(0.05, max(left, 0.0)))
