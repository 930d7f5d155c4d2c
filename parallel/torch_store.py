"""The store that torch's own groups want, where only the ranks of a group reach it.

Torch's stores know no password. On one host the store is a file in a folder that our user alone may enter. Ranks on
several hosts need torch's TCP store; its port hears the hosts of the ranks that the rendezvous let in, and no other.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import struct
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Self

# Documented as public, yet torch re-exports them in a way that type checkers take for private.
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from parallel.errors import ChannelError
from parallel.rendezvous import Notes, Rendezvous
from parallel.shared_memory import NEWBORN, shared_folder

PREFIX = "squadron-store-"
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")
_YES, _NO = "yes", "no"
_FILE = "file"
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# Of linux/filter.h: load a word, go on or skip, return; and where the header of the network's layer begins.
_LOAD, _IF_EQUAL, _RETURN, _NETWORK = 0x20, 0x15, 0x06, 0xFFF00000
_PASS, _DROP = 0xFFFFFFFF, 0


class TorchStore:
    """One group's store. All ranks make it at once; rank 0 serves it until it is closed.

    Raises `RendezvousError` when the others do not come within `timeout` seconds.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, rank: int, size: int, timeout: float) -> None:
        notes = rendezvous.store(f"{name}/torch", timeout)
        self._folder: PrivateFolder | None = None
        self._timeout = timedelta(seconds=timeout)
        if rank == 0:
            self._store: Store | None = self._serve(rendezvous, notes, size)
        else:
            self._store = self._find(rendezvous, notes, rank)

    @property
    def shares_a_file(self) -> bool:
        """Whether all ranks are on one host."""
        return self._folder is not None

    def view(self, name: str) -> Store:
        """Return a part of the store for one use of it."""
        if self._store is None:
            raise ChannelError("the store is closed")
        part = PrefixStore(name, self._store)
        part.set_timeout(self._timeout)
        return part

    def close(self) -> None:
        """Let go, once what was made with the store has ended. Can be called twice."""
        self._store = None
        if self._folder is not None:
            self._folder.close()

    def _serve(self, rendezvous: Rendezvous, notes: Notes, size: int) -> Store:
        folder = PrivateFolder.create()
        notes.set("folder", folder.name)
        answers = {notes.get(f"shares/{rank}") for rank in range(1, size)}
        if answers == {_YES}:
            self._folder = folder
            store: Store = FileStore(str(folder.path / "store"))
            notes.set("where", _FILE)
            return store
        folder.close()
        host = rendezvous.address.host
        family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        # TCPStore itself would listen on every interface, so it gets a socket that is bound to one.
        listener = socket.create_server(where[:2], family=family, backlog=128)
        hear_only(listener, [str(where[0]), *rendezvous.hosts])
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, None, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        notes.set("where", str(port))
        return store

    def _find(self, rendezvous: Rendezvous, notes: Notes, rank: int) -> Store:
        try:
            folder: PrivateFolder | None = PrivateFolder.attach(notes.get("folder"))
        except ChannelError:
            folder = None  # on another host than rank 0
        notes.set(f"shares/{rank}", _NO if folder is None else _YES)
        where = notes.get("where")
        if where == _FILE and folder is not None:
            self._folder = folder
            return FileStore(str(folder.path / "store"))
        if folder is not None:
            folder.close()
        return TCPStore(rendezvous.address.host, int(where), None, False, self._timeout, wait_for_workers=False)


class PrivateFolder:
    """A folder for the processes of one host and user; its name goes with its owner, or soon after a killed one."""

    def __init__(self, path: Path, descriptor: int, owner: bool) -> None:
        self.path = path
        self.name = path.name
        self._end = weakref.finalize(self, _end, descriptor, path if owner else None)

    @classmethod
    def create(cls) -> PrivateFolder:
        """Make one with a name that cannot be guessed. Raises `ChannelError` where none can be made."""
        _sweep()
        path = Path(shared_folder()) / f"{PREFIX}{secrets.token_hex(16)}"
        try:
            path.mkdir(mode=0o700)
            descriptor = _open(path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise ChannelError(f"no folder can be made in {path.parent}: {error}") from error
        return cls(path, descriptor, owner=True)

    @classmethod
    def attach(cls, name: str) -> PrivateFolder:
        """Return the one that another rank made. Raises `ChannelError` when it is not here, or not ours alone."""
        if not _NAME.fullmatch(name):
            raise ChannelError(f"{name!r} is no name of a folder of a group")
        path = Path(shared_folder()) / name
        try:
            descriptor = _open(path)
        except OSError as error:
            raise ChannelError(f"the driver's folder {name} is not here: {error}") from error
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            os.close(descriptor)
            raise ChannelError(f"{name} is not a folder of this user alone")
        return cls(path, descriptor, owner=False)

    def close(self) -> None:
        """Let go; the owner's end removes the folder. Can be called twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def hear_only(listener: socket.socket, hosts: Iterable[str]) -> None:
    """Have the kernel drop what comes to `listener` from other addresses than `hosts`; nothing outside Linux.

    Source: Linux, Documentation/networking/filter.rst. Raises `OSError` where the kernel refuses.
    """
    if sys.platform != "linux":
        return
    family = listener.family
    program = b"".join(_passes(socket.inet_pton(family, host), family) for host in sorted(set(hosts)))
    program += _instruction(_RETURN, _DROP)
    memory = ctypes.create_string_buffer(program, len(program))
    attached = struct.pack("HL", len(program) // 8, ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)


def _passes(address: bytes, family: int) -> bytes:
    """Return instructions that let pass what comes from `address`, and go on behind them otherwise."""
    start = _NETWORK + (12 if family == socket.AF_INET else 8)  # where the source stands in the header
    words: Sequence[int] = struct.unpack(f">{len(address) // 4}I", address)
    left = 2 * len(words)  # instructions behind this one, the return among them
    program = b""
    for number, word in enumerate(words):
        left -= 2
        program += _instruction(_LOAD, start + 4 * number) + _instruction(_IF_EQUAL, word, left + 1)
    return program + _instruction(_RETURN, _PASS)


def _instruction(code: int, value: int, skip_unless: int = 0) -> bytes:
    return struct.pack("HBBI", code, 0, skip_unless, value)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _end(descriptor: int, path: Path | None) -> None:
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _sweep() -> None:
    """Remove folders of owners that were killed. What is not ours, or changes meanwhile, is left."""
    for path in Path(shared_folder()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                continue
            if time.time() - facts.st_mtime < NEWBORN:
                continue
            descriptor = _open(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
