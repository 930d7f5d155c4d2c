"""Who may write to a ledger: one driver at a time, each in an epoch of its own, and none after a later one began.

An epoch is a file that only one driver can have created. Its holder keeps a lock on it, which the system lets go of
when the process ends however it ends, and touches it, for drivers on other hosts. Source of the idea: M. Kleppmann,
"How to do distributed locking", 2016 (fencing tokens); what a token guards here are the lengths of earlier files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from cluster.batch.errors import BusyError, FencedError, LedgerError
from cluster.batch.ledger.folder import latest_epoch, remove_contents, remove_empty, remove_holders
from cluster.private_files import FILE

logger = logging.getLogger(__name__)

BEAT = 2.0  # seconds between two signs of life
LEASE = 15.0  # seconds without one, after which a driver on another host is taken for dead


class Holder(msgspec.Struct, frozen=True):
    """Who holds an epoch."""

    host: str
    boot: str
    pid: int


class Epoch:
    """The right to write to the ledger in `folder`, from now until a later epoch begins. Close it to let go.

    Epochs before it are removed: their holders are fenced. Raises `BusyError` when another driver holds it, or let go
    of it a moment ago, and `LedgerError` when the folder cannot be written. lease: seconds that a driver on another
    host may be silent.
    """

    def __init__(self, folder: Path, lease: float = LEASE) -> None:
        self.folder = folder
        self._closed = threading.Event()
        self._closing = threading.Lock()
        try:
            self._fd = self._begun(lease)
        except FileExistsError:
            raise BusyError(f"another driver began to work on {folder} at the same time") from None
        except FileNotFoundError:
            raise BusyError(f"another driver has just ended or begun its work on {folder}: run this again") from None
        except OSError as error:
            raise _failed(folder, error) from error

    def beat(self) -> None:
        """Show a sign of life; to be called every `BEAT` seconds. Raises `FencedError`, `LedgerError`."""
        with self._closing:  # what was let go of may be another file by now
            if self._fd >= 0:
                self.check()
                try:
                    os.utime(self._fd)
                except OSError as error:
                    raise _failed(self.folder, error) from error

    def keep_beating(self) -> None:
        """Beat in a thread until it is closed, however long its holder waits or whatever it is at work on."""
        threading.Thread(target=self._beats, name="epoch", daemon=True).start()

    def check(self) -> None:
        """Raise `FencedError` when a later epoch began."""
        if _path(self.folder, self.number + 1).exists() or not self._path.exists():
            raise FencedError(
                f"another driver has taken over {self.folder}: this one stops, and what it did so far is kept"
            )

    def remove_folder(self) -> None:
        """Remove all that is a ledger's, let go, and remove the folder: nobody needs it any more.

        What others have put into the folder stays, and the folder with it. Raises `FencedError`, `LedgerError`.
        """
        self.check()
        try:
            remove_contents(self.folder)
            self.close()  # first: on NFS, a file that is open keeps a name
            remove_holders(self.folder, self.number)
        except OSError as error:
            raise LedgerError(f"{self.folder} is needed no more, and cannot be removed: {error.strerror}") from error
        remove_empty(self.folder)

    def close(self) -> None:
        """Let go. Can be called twice."""
        self._closed.set()
        with self._closing:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _beats(self) -> None:
        while not self._closed.wait(BEAT):
            try:
                self.beat()
            except FencedError:
                return  # its holder is told so when it next writes
            except (LedgerError, OSError) as error:
                logger.warning("no sign of life in %s, another one follows: %s", self.folder, error)

    def _begun(self, lease: float) -> int:
        before = latest_epoch(self.folder)
        if before:
            _refuse_if_held(_path(self.folder, before), lease)
        self.number = before + 1
        self._path = _path(self.folder, self.number)
        with ExitStack() as undo:
            fd = self._claimed(undo)
            remove_holders(self.folder, before)
            undo.pop_all()
        return fd

    def _claimed(self, undo: ExitStack) -> int:
        """Return a descriptor of the new epoch, locked; `undo` closes it."""
        holder = Holder(socket.gethostname(), boot_id(), os.getpid())
        # Locked under another name first: there is no moment at which the epoch is there and not locked.
        draft = self.folder / f"draft-{holder.host}-{holder.pid}-{time.monotonic_ns()}"
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE)
        undo.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, msgspec.json.encode(holder))
            os.link(draft, self._path)
        finally:
            draft.unlink(missing_ok=True)
        return fd


def _path(folder: Path, number: int) -> Path:
    return folder / f"epoch-{number:08}"


def _refuse_if_held(path: Path, lease: float) -> None:
    try:
        holder = msgspec.json.decode(path.read_bytes(), type=Holder)
    except msgspec.MsgspecError:
        return  # its driver died in the middle of claiming it
    # Where the boot is another one, so may the machine be: two can have one name.
    here = (holder.host, holder.boot) == (socket.gethostname(), boot_id())
    if _is_locked(path) if here else _moves(path, lease):
        raise BusyError(
            f"another driver (process {holder.pid} on {holder.host}) works on {path.parent}; wait for it, or end it "
            "and run this again with --resume"
        )


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _moves(path: Path, lease: float) -> bool:
    """Whether a sign of life comes within `lease` seconds; no clock but this process's own is asked."""
    seen = path.stat().st_mtime_ns
    deadline = time.monotonic() + lease
    while time.monotonic() < deadline:
        time.sleep(min(BEAT / 4, lease / 4))
        if path.stat().st_mtime_ns != seen:
            return True
    return False


def boot_id() -> str:
    """Return what tells this start of the machine from all others, "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # not Linux: the lock alone tells


def _failed(folder: Path, error: OSError) -> LedgerError:
    return LedgerError(f"{folder} cannot be written: {error.strerror}; there must be room, and the right to write")
