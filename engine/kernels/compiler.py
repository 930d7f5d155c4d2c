"""Compiles the C sources of this folder for this machine, once: a library is kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
ISA_VARIABLE = "SQUADRON_CPU_ISA"
# What kernels may use of an x86 CPU: gcc's name of the machine, and a flag of /proc/cpuinfo that says who has it.
ISAS = {
    "avx2": ("x86-64-v3", "avx2"),
    "avx512": ("x86-64-v4", "avx512vl"),
    "avx512_bf16": ("cooperlake", "avx512_bf16"),
    "amx": ("sapphirerapids", "amx_bf16"),
}
NATIVE = "native"
COMPILERS = ("gcc", "cc", "clang")  # gcc first: it asks for the OpenMP runtime that torch brings along
TIMEOUT = 60.0  # seconds; one is usual


def isas() -> list[str]:
    """Return the values of `SQUADRON_CPU_ISA` that this CPU can be taken for, `native` not among them."""
    flags = {flag for line in processor() for flag in line.split()}
    return [name for name, (_, flag) in ISAS.items() if flag in flags]


def chosen_isa() -> str:
    """Return what kernels may use of the CPU: all, `native`, or what `SQUADRON_CPU_ISA` says.

    It concerns our own kernels. `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` say the same to oneDNN and torch.
    Raises `ConfigError` for what this CPU lacks.
    """
    isa = os.environ.get(ISA_VARIABLE, NATIVE)
    if isa != NATIVE and isa not in isas():
        here = ", ".join((NATIVE, *isas()))
        raise ConfigError(f"{ISA_VARIABLE}={isa} is unknown, or this CPU does not have it; use {here}", ISA_VARIABLE)
    return isa


def _machine_flag() -> str:
    isa = chosen_isa()
    return f"-march={NATIVE if isa == NATIVE else ISAS[isa][0]}"


def load_library(sources: Sequence[str], macros: Mapping[str, int]) -> ctypes.CDLL | None:
    """Return `sources`, files of this folder, compiled with `macros`, or None where they cannot be; why is logged.

    The library shares torch's threads: it asks for the OpenMP runtime that torch has loaded before.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        logger.info("no C compiler (%s) is installed: torch's operations are used", ", ".join(COMPILERS))
        return None
    try:
        library = _load_kept(compiler, sources, macros)
        if library is None:
            with tempfile.TemporaryDirectory(prefix="squadron-") as folder:
                library = _build(compiler, sources, macros, Path(folder) / "kernels.so")
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        logger.warning("the CPU kernels cannot be compiled, torch's operations are used: %s", reason)
        return None
    return library


def _load_kept(compiler: str, sources: Sequence[str], macros: Mapping[str, int]) -> ctypes.CDLL | None:
    """Return the library that is kept for this machine, built when there is none; None where none can be kept."""
    folder = cache_folder("kernels")
    if folder is None:
        return None
    try:
        library = folder / f"{_fingerprint(compiler, sources, macros)}.so"
        # One that does not load comes of a host with another C library, or was cut short when its host went down.
        with contextlib.suppress(OSError):
            if is_private(library):
                return ctypes.CDLL(str(library))
        return _build(compiler, sources, macros, library)
    except OSError as error:  # full, or mounted without permission to execute
        logger.info("the CPU kernels cannot be kept in %s, every process builds its own: %s", folder, error)
        return None


def _build(compiler: str, sources: Sequence[str], macros: Mapping[str, int], library: Path) -> ctypes.CDLL:
    """Write `library` in one move, because other ranks may be about to do the same, and load it."""
    handle, unfinished = tempfile.mkstemp(suffix=".tmp", dir=library.parent)
    os.close(handle)
    try:
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        files = [str(FOLDER / name) for name in sources]
        _run([compiler, *FLAGS, _machine_flag(), *defines, *files, "-o", unfinished, "-lm"])
        with open(unfinished, "rb") as written:
            os.fsync(written.fileno())
        Path(unfinished).chmod(stat.S_IRWXU)
        Path(unfinished).replace(library)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return ctypes.CDLL(str(library))


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


def _fingerprint(compiler: str, sources: Sequence[str], macros: Mapping[str, int]) -> str:
    """Name sources, macros, compiler and processor: unlike machines may share a home folder."""
    found = blake2b(digest_size=16)
    for source in sorted([*(FOLDER / name for name in sources), *FOLDER.glob("*.h")]):
        found.update(source.read_bytes())
    modified = Path(compiler).stat().st_mtime_ns
    found.update(repr((FLAGS, _machine_flag(), sorted(macros.items()), compiler, modified, processor())).encode())
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
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
