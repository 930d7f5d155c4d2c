"""Whether the machine gives enough: shared memory, open files, disk, GPUs."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.constants import HF_HUB_CACHE

from deploy.cli.terminal import GIB, MIB, gib
from deploy.doctor.checks import Finding, ProbeError, ask, fix, ok, warning
from deploy.doctor.gpu_host import driver, driver_version
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


class DiskSpace(NamedTuple):
    """Bytes of a file system, as `shutil.disk_usage` gives them."""

    total: int
    used: int
    free: int


def check_shared_memory() -> list[Finding]:
    """Check /dev/shm."""
    return [shared_memory(DiskSpace(*shutil.disk_usage(SHARED)) if SHARED.is_dir() else None)]


def shared_memory(usage: DiskSpace | None) -> Finding:
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
    """Check the limit of open files."""
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
    """Check the disks of models and temporary files. temporary: Ray's own, None = this system's."""
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
    found = DiskSpace(*usage(there))
    text = f"{gib(found.free)} of {gib(found.total)} free for {folder}"
    if found.free < LEAST_DISK:
        return fix(name, text, remedy)
    if found.free < good:
        return warning(name, f"{text}: a model may need more", remedy)
    if found.used > FULL * found.total:
        return warning(name, f"{text}, but Ray takes a disk that is {FULL:.0%} full for full", remedy)
    return ok(name, text)


PROBE_SECONDS = 60.0  # importing torch from a cold disk takes most of it
LEAST_FREE = 0.9  # share of a GPU's memory: what --gpu-memory-utilization asks for by default
DRIVER = "install or update NVIDIA's driver; `nvidia-smi` must list the GPUs"


def check_devices() -> list[Finding]:
    """Ask torch, in a process of its own, for GPUs and NCCL."""
    return devices(nvidia_devices(), lambda: ask("torch_devices", seconds=PROBE_SECONDS), driver_version())


def nvidia_devices(folder: Path = Path("/dev")) -> int:
    """Return how many GPUs NVIDIA's driver offers to this machine or container."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in folder.glob("nvidia*"))


def devices(here: int, probe: Callable[[], Mapping[str, Any]], running: str | None = None) -> list[Finding]:
    """Return findings on GPUs, driver and NCCL. here: GPUs that the driver offers. running: its version, if known."""
    try:
        report = probe()
    except ProbeError as error:
        return [fix("gpus", f"torch cannot be asked: {error}", "see that `python -c 'import torch'` works")]
    gpus: Sequence[Mapping[str, Any]] = report["gpus"]
    of_driver = [driver(running, report["cuda"], bool(gpus))] if running and report["cuda"] else []
    if gpus:
        return [*_listed(gpus, here), *of_driver, _nccl(report, len(gpus)), _attention(report)]
    if not here:
        return [ok("gpus", "none here: models run on the CPU"), ok("nccl", "not needed without GPUs")]
    if not report["cuda"]:
        return [
            fix(
                "gpus",
                f"the driver offers {here}, but torch {report['torch']} is built for CPUs",
                "install a build of torch for CUDA (pytorch.org, Get Started)",
            )
        ]
    why = f" ({report['complaint']})" if report["complaint"] else ""
    none = f"the driver offers {here}, but torch for CUDA {report['cuda']} sees none{why}"
    return [fix("gpus", none, DRIVER), *of_driver]


def _listed(gpus: Sequence[Mapping[str, Any]], here: int) -> list[Finding]:
    kinds = sorted({gpu["name"] for gpu in gpus})
    findings = [ok("gpus", f"{len(gpus)} x {', '.join(kinds)}")]
    if len(gpus) < here:
        findings.append(
            warning("gpus", f"torch sees {len(gpus)} of {here}", "see that CUDA_VISIBLE_DEVICES names all of them")
        )
    for number, gpu in enumerate(gpus):
        if gpu["free"] < LEAST_FREE * gpu["total"]:
            findings.append(
                warning(
                    "gpus",
                    f"GPU {number} has {gib(gpu['free'])} of {gib(gpu['total'])} free",
                    "end what else runs there (`nvidia-smi`), or lower --gpu-memory-utilization",
                )
            )
    return findings


def _nccl(report: Mapping[str, Any], count: int) -> Finding:
    if report["nccl"]:
        return ok("nccl", f"in torch {report['torch']}")
    if count == 1:
        return warning("nccl", "torch has none", "install a build of torch with NCCL before using several GPUs")
    return fix("nccl", "torch has none: ranks on several GPUs cannot meet", "install a build of torch with NCCL")


def _attention(report: Mapping[str, Any]) -> Finding:
    found = [name for name, there in (("flash-attn", "flash_attn"), ("triton", "triton")) if report[there]]
    if found:
        return ok("attention", f"{' and '.join(found)} installed")
    remedy = "pip install -e '.[gpu]' in Squadron's folder"
    return warning("attention", "neither triton nor flash-attn: slow on GPUs", remedy)


SLOW = "made plain for each product, which is slow"


def check_weights() -> list[Finding]:
    """Say which quantised weights are multiplied as they are, by what a process of its own finds."""
    return weights(lambda: ask("weights", seconds=PROBE_SECONDS))


def weights(probe: Callable[[], Mapping[str, Any]]) -> list[Finding]:
    """Return the finding on quantised weights."""
    try:
        report = probe()
    except ProbeError as error:
        remedy = "see that `python -c 'import torch, engine'` works"
        return [warning("weights", f"what multiplies by quantised ones is not known: {error}", remedy)]
    if report["gpu"]:
        fp8 = "fp8 by matrix units, int8 by Triton" if report["fp8"] else "int8 by Triton; there are no units for fp8"
        return [ok("weights", f"{fp8}; four bits and fp8 by blocks by Triton for few rows and experts, else {SLOW}")]
    if report["compiled"] is None:
        text = f"int8 and int4 by torch's products where it has them, else {SLOW}, as fp8 and four-bit floats are"
        remedy = "install a C compiler (gcc 11 or later), of which products of our own are made"
        return [warning("weights", f"{text}: {report['why']}", remedy)]
    return [ok("weights", f"int8, four bits and fp8 by products compiled for {report['compiled']}")]
