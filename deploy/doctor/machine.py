"""Whether the machine gives enough: shared memory, open files, disk."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.constants import HF_HUB_CACHE

from deploy.cli.sizes import GIB, MIB, gib
from deploy.doctor.finding import Finding, fix, ok, warning
from deploy.serve.environment import OBJECT_STORE_BYTES

SHARED = Path("/dev") / "shm"
# Ray's object store, and a message ring for each tensor-parallel group; NCCL takes more for each pair of ranks.
LEAST_SHARED = OBJECT_STORE_BYTES + 16 * MIB
GOOD_SHARED = 1 * GIB
# A stream takes a socket in the proxy and one in the router, and Ray's own processes a few hundred.
LEAST_FILES, GOOD_FILES = 1024, 8192
LEAST_DISK = 1 * GIB
GOOD_CACHE, GOOD_TEMPORARY = 20 * GIB, 5 * GIB
FULL = 0.95  # share of a disk beyond which Ray stops spilling to it


class Usage(NamedTuple):
    """Bytes of a file system, as `shutil.disk_usage` gives them."""

    total: int
    used: int
    free: int


def check_shared_memory() -> list[Finding]:
    """Look at /dev/shm."""
    return [shared_memory(Usage(*shutil.disk_usage(SHARED)) if SHARED.is_dir() else None)]


def shared_memory(usage: Usage | None) -> Finding:
    """Return whether shared memory suffices. usage: None where there is no such folder."""
    name = "shared memory"
    if usage is None:
        return ok(name, "this system has no /dev/shm to be too small")
    text = f"{gib(usage.free)} of {gib(usage.total)} free in {SHARED}"
    remedy = (
        "docker run --shm-size=8g; on Kubernetes an emptyDir with medium: Memory at /dev/shm; or remove old files"
    )
    if usage.free < LEAST_SHARED:
        return fix(name, f"{text}, less than the {gib(LEAST_SHARED)} that Ray and the ranks take", remedy)
    if usage.free < GOOD_SHARED:
        return warning(name, f"{text}: little for NCCL and several groups", remedy)
    return ok(name, text)


def check_open_files() -> list[Finding]:
    """Look at the limit of open files."""
    return [open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))]


def open_files(soft: int, hard: int) -> Finding:
    """Return whether enough files may be open at a time; a negative limit is none."""
    if soft < 0 or soft >= GOOD_FILES:
        return ok("open files", "no limit" if soft < 0 else f"{soft:,} at a time")
    wanted = 65536
    if 0 <= hard < GOOD_FILES:
        remedy = (
            f"raise the hard limit of {hard:,}: limits.conf, LimitNOFILE= of systemd, or docker run --ulimit nofile"
        )
    else:
        remedy = f"ulimit -n {wanted if hard < 0 else min(wanted, hard)}"
    text = f"{soft:,} at a time; each stream takes two"
    if soft < LEAST_FILES:
        return fix("open files", text, remedy)
    return warning("open files", text, remedy)


def check_disks(temporary: str | None) -> list[Finding]:
    """Look at where models and temporary files are kept. temporary: Ray's own, None = this system's."""
    folder = Path(temporary or tempfile.gettempdir())
    return [
        disk(
            "model cache", Path(HF_HUB_CACHE), GOOD_CACHE, "point HF_HOME to a larger disk, or give models as folders"
        ),
        disk("temporary files", folder, GOOD_TEMPORARY, "make room there, or point TMPDIR to a larger disk"),
    ]


def disk(
    name: str, folder: Path, good: int, remedy: str, usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage
) -> Finding:
    """Return whether there is room in a folder, which need not exist yet, and whether it can be written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return fix(name, f"{there} cannot be written to", f"give its owner's rights to this user, or: {remedy}")
    found = Usage(*usage(there))
    text = f"{gib(found.free)} of {gib(found.total)} free for {folder}"
    if found.free < LEAST_DISK:
        return fix(name, text, remedy)
    if found.free < good:
        return warning(name, f"{text}: a model may need more", remedy)
    if found.used > FULL * found.total:
        return warning(name, f"{text}, but Ray takes a disk that is {FULL:.0%} full for full", remedy)
    return ok(name, text)
