"""Where the ranks of a group find each other: a key-value store that rank 0 serves at an address it picks itself."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Self

# Documented as public, yet torch re-exports them in a way that type checkers take for private.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from parallel.errors import RendezvousError

STORE_TIMEOUT = 300.0  # seconds; each connection sets its own before it waits for anything


class Rendezvous:
    """A store for forming groups, and the address of this process as its peers reach it.

    `Rendezvous.create` serves one (rank 0, which hands `address` to the others), `Rendezvous.join` connects to it.
    Keep it until the groups formed with it are closed. Listens on one interface only.
    """

    def __init__(self, store: Store, address: str, own_host: str) -> None:
        self.address = address  # "host:port" of the store
        self.own_host = own_host  # this process's own address on the network of the store
        self._store: Store | None = store

    @classmethod
    def create(cls, host: str = "127.0.0.1") -> Rendezvous:
        """Serve a store at a free port of `host`, an address of this machine that the other ranks can reach.

        Raises `RendezvousError` when this machine has no such address.
        """
        # TCPStore itself would listen on every interface, so it gets a socket that is bound to one.
        try:
            family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(where[:2], family=family, backlog=128)
        except OSError as error:
            raise RendezvousError(
                f"cannot listen on {host!r} ({error}); give an address of this machine such as 127.0.0.1"
            ) from error
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=STORE_TIMEOUT),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return cls(store, f"{host}:{port}", str(where[0]))

    @classmethod
    def join(cls, address: str, timeout: float) -> Rendezvous:
        """Connect to the store at `address` ("host:port"); it need not listen yet.

        Raises `RendezvousError` when it does not answer within `timeout` seconds.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise RendezvousError(f"rendezvous address {address!r} is not of the form 127.0.0.1:29500")
        own_host = _probe(host, int(port), timeout)
        try:
            store = TCPStore(host, int(port), None, False, timedelta(seconds=timeout), wait_for_workers=False)
        except RuntimeError as error:
            raise RendezvousError(f"the store at {address} does not answer as one: {error}") from error
        return cls(store, address, own_host)

    def close(self) -> None:
        """Stop serving, or disconnect; the groups formed here must be closed already. Can be called twice."""
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def store(self, name: str, timeout: float) -> Store:
        """Return a view of the store for the group called `name`; its waits last `timeout` seconds at most."""
        if self._store is None:
            raise RendezvousError(f"the rendezvous at {self.address} is closed")
        view = PrefixStore(name, self._store)
        view.set_timeout(timedelta(seconds=timeout))
        return view


def _probe(host: str, port: int, timeout: float) -> str:
    # TCPStore reports an absent peer with pages of C++ frames; a plain socket waits for it quietly.
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(left, 0.001)) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if left <= 0:
                raise RendezvousError(f"no rank 0 answers at {host}:{port} after {timeout:g} s: {error}") from error
            time.sleep(min(0.05, max(left, 0.0)))
