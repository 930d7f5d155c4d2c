"""Compiles C sources for this machine, once: a library is kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from parallel.file_lock import locked

logger = logging.getLogger(__name__)

COMPILERS = ("gcc", "cc", "clang")  # gcc first: it asks for the OpenMP runtime that torch brings along
# Sources say where a product and a sum are rounded once. A compiler that contracts on its own does so as the CPU's
# tuning likes, in one loop and not in the next.
FLAGS = ("-O3", "-fPIC", "-shared", "-ffp-contract=off")
TIMEOUT = 300.0  # seconds; one is usual, and a busy machine takes a hundred

Proof = Callable[[ctypes.CDLL], str | None]  # returns what is wrong with a library, None where nothing is


class UnprovenError(Exception):
    """A library that was made, and does not keep what its sources promise."""


def compile_library(
    sources: Sequence[Path], flags: Sequence[str], macros: Mapping[str, int], without: str, proof: Proof | None = None
) -> ctypes.CDLL | None:
    """Return `sources` compiled with `FLAGS`, `flags` and `macros`, or None where they cannot be; why is logged.

    They may include headers of their folder. without: what happens when there is no library, for the log. proof: what
    a library has to pass when it is made; of one that does not, the verdict is kept in its place.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        logger.info("no C compiler (%s) is installed: %s", ", ".join(COMPILERS), without)
        return None
    command = [compiler, *FLAGS, *flags, *(f"-D{name}={value}" for name, value in macros.items()), *map(str, sources)]
    names = ", ".join(source.name for source in sources)
    try:
        library = _load_kept(command, _fingerprint(command, sources, proof), proof)
        if library is None:
            with tempfile.TemporaryDirectory(prefix="squadron-") as folder:
                library = _build(command, Path(folder) / "library.so", proof)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        logger.warning("%s cannot be compiled, %s: %s", names, without, reason)
        return None
    except UnprovenError as error:
        logger.warning("%s as %s compiles it is wrong, %s: %s", names, compiler, without, error)
        return None
    return library


def _load_kept(command: Sequence[str], fingerprint: str, proof: Proof | None) -> ctypes.CDLL | None:
    """Return the library that is kept for this machine, built when there is none; None where none can be kept."""
    folder = cache_folder("kernels")
    if folder is None:
        return None
    library = folder / f"{fingerprint}.so"
    if (loaded := _loaded(library)) is not None:
        return loaded
    try:
        with _alone(library.with_suffix(".lock")):
            return _loaded(library) or _build(command, library, proof)
    except OSError as error:  # full, or mounted without permission to execute
        logger.info("libraries cannot be kept in %s, every process builds its own: %s", folder, error)
        return None


def _loaded(library: Path) -> ctypes.CDLL | None:
    """Return a library that is there, None for none, or for one that does not load.

    Such a one comes of a host with another C library, or was cut short when its host went down. Raises
    `UnprovenError` where there is a verdict in its place.
    """
    with contextlib.suppress(OSError):
        return _opened(library)
    with contextlib.suppress(OSError):
        raise UnprovenError(_verdict(library).read_text(encoding="utf-8"))
    return None


def _opened(library: Path) -> ctypes.CDLL:
    """Load the file that is there once it is known to be ours: what is loaded is what was looked at.

    Raises `OSError`.
    """
    handle = os.open(library, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not _only_ours(found):
            raise PermissionError(f"{library} belongs to or can be written by others")
        # The loader takes what has the name of a library for that library, and numbers of handles come again: so each
        # file has a spelling of its own.
        spelling = "".join("/." if bit == "1" else "/" for bit in f"{found.st_dev:b}{found.st_ino:064b}")
        name = f"/proc/self/fd{spelling}/{handle}"
        return ctypes.CDLL(name if os.path.exists(name) else str(library))  # there is no such folder but on Linux
    finally:
        os.close(handle)


def _verdict(library: Path) -> Path:
    return library.with_suffix(".refused")


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait while another process builds the same, as all ranks do at a first start.

    Where that takes too long, or cannot be told, all build: each writes the library in one move.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(lock, TIMEOUT))
        except OSError as error:
            logger.info("libraries are built without a look at other processes: %s", error)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _build(command: Sequence[str], library: Path, proof: Proof | None) -> ctypes.CDLL:
    """Write `library` in one move, because other processes may be about to do the same, and load it.

    Raises `UnprovenError`, and keeps the verdict, where it does not pass `proof`.
    """
    handle, unfinished = tempfile.mkstemp(suffix=".tmp", dir=library.parent)
    os.close(handle)
    try:
        _run([*command, "-o", unfinished, "-lm"])
        with open(unfinished, "rb") as written:
            os.fsync(written.fileno())
        Path(unfinished).chmod(stat.S_IRWXU)
        built = _opened(Path(unfinished))
        reason = None if proof is None else proof(built)
        if reason is not None:
            _verdict(library).write_text(reason, encoding="utf-8")
            raise UnprovenError(reason)
        Path(unfinished).replace(library)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return built


def _run(command: Sequence[str]) -> None:
    """Run the compiler; what it started ends with it when it takes too long.

    Raises `subprocess.SubprocessError`, with what it complained of.
    """
    with subprocess.Popen(  # noqa: S603 - a compiler from PATH, our own files, numbers
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, complaints = process.communicate(timeout=TIMEOUT)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=complaints)


def _fingerprint(command: Sequence[str], sources: Sequence[Path], proof: Proof | None = None) -> str:
    """Name what is compiled, how, by what and where, and what is proved: unlike machines may share a home folder."""
    found = blake2b(digest_size=16)
    headers = {header for source in sources for header in source.parent.glob("*.h")}
    proofs = () if proof is None else (Path(inspect.getfile(proof)),)
    for file in sorted({*sources, *headers, *proofs}):
        found.update(file.read_bytes())
    compiler, *options = command
    modified = Path(compiler).stat().st_mtime_ns
    found.update(repr((options[: -len(sources)], compiler, modified, processor())).encode())
    return found.hexdigest()


def processor() -> list[str]:
    """Return lines that tell what this CPU is and can, sorted."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return [platform.machine(), platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model", "CPU part"))})


def cache_folder(name: str) -> Path | None:
    """Return where what is called so is kept, or None where this user has no folder that only he can write to."""
    try:
        folder = Path.home() / ".cache" / "squadron" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    if not is_private(folder):
        logger.warning("%s belongs to or can be written by others: nothing is kept or loaded there", folder)
        return None
    return folder if os.access(folder, os.W_OK) else None


def is_private(path: Path) -> bool:
    """Whether this user owns what is there, and no other may write to it: what is loaded from it runs as us."""
    try:
        return _only_ours(path.stat())
    except OSError:
        return False


def _only_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
