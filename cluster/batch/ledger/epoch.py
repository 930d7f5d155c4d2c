"""The folder of a ledger, and who may write to it: one driver at a time, and none after a later one began.

Each driver has an epoch: a file that only one driver can have created. Its holder keeps a lock on it, which the
system releases when the process ends however it ends, and touches it, for drivers on other hosts. Source of the idea:
M. Kleppmann, "How to do distributed locking", 2016 (fencing tokens); what a token guards here are the lengths of
earlier files.

`job.json` decides whether the folder holds a ledger. Without it, whatever else is there is left of a ledger whose
removal was cut off, and counts for nothing; so it is removed first, and the epochs, which tell who may write, last.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from cluster.batch.errors import BusyError, FencedError, LedgerError
from cluster.private_files import FILE

JOB_FILE = "job.json"
REPLICAS_FILE = "replicas"  # the fingerprint that they report
OUTPUT_FILE = "squadron-output.jsonl"  # of a server's batch, until the store has it
EPOCH_FILE = re.compile(r"epoch-(\d{8})")
HOLDERS = ("epoch-", "draft-")  # who writes, and who tries to
STANDARD_INPUT = "stdin."
OWN_FILE = re.compile(
    r"job\.(json|draft)|replicas(\.draft)?|parts-\d{8}\.(json|draft)|order-\d{8}"
    r"|rows-\d{8}\.log|tokens-\d{8}-\d{8}\.(log|draft)"
    r"|epoch-\d{8}|draft-.+-\d+-\d+"
    r"|stdin\..+"
    r"|\..+\.\d+-\d+\.draft"  # of an output behind a URL
    rf"|{re.escape(OUTPUT_FILE)}.*"
)
OWN_FOLDER = re.compile(r"ids-\w{8}")  # of the check of an input
logger = logging.getLogger(__name__)
BEAT = 2.0  # seconds between two signs of life
LEASE = 15.0  # seconds without one, after which a driver on another host is taken for dead
ONLY_OURS = 0o700


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
        """Remove all that is a ledger's, let go, and remove the folder, which is not needed any more.

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
                return  # its holder finds out when it next writes
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
    """Return the id of this boot of the machine, "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # not Linux: the lock alone shows it


def _failed(folder: Path, error: OSError) -> LedgerError:
    return LedgerError(f"{folder} cannot be written: {error.strerror}; there must be room, and the right to write")


def refuse_foreign(folder: Path) -> None:
    """Raise `LedgerError` when there is anything in `folder` that no ledger has written."""
    try:
        foreign = next((path.name for path in folder.iterdir() if not _is_own(path)), None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LedgerError(f"{folder} cannot be read: {error.strerror}; name another with --ledger") from error
    if foreign is not None:
        raise LedgerError(
            f"{folder} holds {foreign!r}, which is of no ledger: give the ledger a folder of its own, such as "
            f"--ledger {folder / 'ledger'}, or move that file away"
        )


def refuse_within(folder: Path, paths: Iterable[str]) -> None:
    """Raise `LedgerError` when one of `paths`, of this machine, lies in `folder`, or is a folder around it.

    What lies in it would go with the ledger; what reads a folder around it would take the ledger for rows.
    """
    ledger = Path(os.path.realpath(folder))
    for path in paths:
        other = Path(os.path.realpath(path))
        if ledger in (other, *other.parents):
            raise LedgerError(
                f"{path} lies in {folder}, the folder of the ledger, which is removed when the batch is done: move "
                "it, or name another folder with --ledger"
            )
        if other in ledger.parents:
            raise LedgerError(f"{folder}, the folder of the ledger, lies in {path}: name another with --ledger")


def begin_anew(folder: Path) -> None:
    """Remove what a ledger has left, but not who holds it, nor the input that it keeps. Raises `OSError`."""
    _remove(folder, lambda name: not name.startswith((*HOLDERS, STANDARD_INPUT)))


def remove_contents(folder: Path) -> None:
    """Remove all that is a ledger's, but not who holds it. Raises `OSError`."""
    _remove(folder, lambda name: not name.startswith(HOLDERS))


def remove_holders(folder: Path, last: int) -> None:
    """Remove the epochs up to `last`, and what claims that were killed have left. Raises `OSError`."""
    _remove(folder, lambda name: name.startswith(HOLDERS) and _epoch(name) <= last)


def remove_empty(folder: Path) -> None:
    """Remove the folder itself; it stays where others have put something into it, or it is a mount."""
    with suppress(OSError):
        folder.rmdir()


def latest_epoch(folder: Path) -> int:
    """Return the number of the last epoch that began, 0 for none. Raises `OSError`."""
    return max((_epoch(path.name) for path in folder.iterdir()), default=0)


def _epoch(name: str) -> int:
    match = EPOCH_FILE.fullmatch(name)
    return int(match[1]) if match else 0


def _is_own(path: Path) -> bool:
    return (OWN_FOLDER if path.is_dir() else OWN_FILE).fullmatch(path.name) is not None


def _remove(folder: Path, chosen: Callable[[str], bool]) -> None:
    """Remove what is a ledger's and `chosen` by its name: of what is there now, for others may begin meanwhile."""
    paths = [path for path in folder.iterdir() if chosen(path.name) and _is_own(path)]
    for path in sorted(paths, key=lambda path: (path.name != JOB_FILE, path.name)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make a folder that only this user opens, or make it so. Raises `LedgerError` where it is another user's."""
    try:
        folder.mkdir(mode=ONLY_OURS, exist_ok=True)
        found = folder.lstat()  # a link may lead anywhere
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            if stat.S_IMODE(found.st_mode) & ~ONLY_OURS:
                folder.chmod(ONLY_OURS)
            return
    except OSError as error:
        raise LedgerError(f"{folder} cannot be made: {error.strerror}; name another place with TMPDIR") from error
    raise LedgerError(
        f"{folder} is no folder of this user's, so others could read it; name another place with TMPDIR"
    )
