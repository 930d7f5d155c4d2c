"""Compiles the C sources of this folder for this machine, once: the library is kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT = 60.0  # seconds; half a second is usual


def load_library(macros: Mapping[str, int]) -> ctypes.CDLL | None:
    """Return the sources compiled with `macros`, or None where they cannot be; the reason is logged.

    The library shares torch's threads: it asks for the OpenMP runtime that torch has loaded before.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        logger.info("no C compiler (%s) is installed: torch's operations are used", ", ".join(COMPILERS))
        return None
    try:
        folder = _cache_folder()
        if folder is not None:
            return _load(compiler, macros, folder)
        with tempfile.TemporaryDirectory(prefix="squadron-") as temporary:
            return _load(compiler, macros, Path(temporary))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        logger.warning("the CPU kernels cannot be compiled, torch's operations are used: %s", reason)
        return None


def _load(compiler: str, macros: Mapping[str, int], folder: Path) -> ctypes.CDLL:
    library = folder / f"{_fingerprint(compiler, macros)}.so"
    if not library.is_file():
        _compile(compiler, macros, library)
    return ctypes.CDLL(str(library))


def _compile(compiler: str, macros: Mapping[str, int], library: Path) -> None:
    """Write `library` in one move: other ranks may be about to do the same."""
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    command = [compiler, *FLAGS, *defines, *map(str, sorted(SOURCES.glob("*.c"))), "-o", unfinished, "-lm"]
    try:
        # S603 asks whether the command can be trusted: compiler from PATH, our own files, numbers.
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)  # noqa: S603
        Path(unfinished).replace(library)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _fingerprint(compiler: str, macros: Mapping[str, int]) -> str:
    """Name sources, macros, compiler and processor: unlike machines may share a home folder."""
    found = blake2b(digest_size=16)
    for source in sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")]):
        found.update(source.read_bytes())
    modified = Path(compiler).stat().st_mtime_ns
    found.update(repr((FLAGS, sorted(macros.items()), compiler, modified, _processor())).encode())
    return found.hexdigest()


def _processor() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return [platform.machine(), platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model", "CPU part"))})


def _cache_folder() -> Path | None:
    """Return where libraries are kept, or None where this user has no folder of his own to keep them in."""
    try:
        folder = Path.home() / ".cache" / "squadron" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = folder.stat().st_uid == os.getuid()
    except (OSError, RuntimeError):
        return None
    return folder if mine and os.access(folder, os.W_OK) else None
