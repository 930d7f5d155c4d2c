"""Rank 0's side of a rendezvous: a port that opens to those who know the group's secret, notes, and who has come."""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress

from parallel.errors import ChannelError, RendezvousError
from parallel.handshake import let_in, receive_frame, send_frame, set_options

logger = logging.getLogger(__name__)

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
                if not self._closed:  # out of file descriptors, say: whoever calls waits meanwhile
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
            # One line for all of them: whoever knocks must not fill the log.
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
    """Wake whoever waits on a socket: closing alone does not."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
