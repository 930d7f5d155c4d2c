"""Whether the GPUs of this machine can be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.cli.sizes import gib
from deploy.doctor.finding import Finding, fix, ok, warning
from deploy.doctor.probe import ProbeError, ask

PROBE_SECONDS = 60.0  # importing torch from a cold disk takes most of it
LEAST_FREE = 0.9  # share of a GPU's memory: what --gpu-memory-utilization asks for by default
DRIVER = "install or update NVIDIA's driver; `nvidia-smi` must list the GPUs"


def check_devices() -> list[Finding]:
    """Ask torch, in a process of its own, for GPUs and NCCL."""
    return devices(nvidia_devices(), lambda: ask("torch_devices", seconds=PROBE_SECONDS))


def nvidia_devices(folder: Path = Path("/dev")) -> int:
    """Return how many GPUs NVIDIA's driver offers to this machine or container."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in folder.glob("nvidia*"))


def devices(here: int, probe: Callable[[], Mapping[str, Any]]) -> list[Finding]:
    """Return findings on GPUs and NCCL. here: GPUs that the driver offers."""
    try:
        report = probe()
    except ProbeError as error:
        return [fix("gpus", f"torch cannot be asked: {error}", "see that `python -c 'import torch'` works")]
    gpus: Sequence[Mapping[str, Any]] = report["gpus"]
    if gpus:
        return [*_listed(gpus, here), _nccl(report, len(gpus)), _attention(report)]
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
    return [fix("gpus", f"the driver offers {here}, but torch for CUDA {report['cuda']} sees none{why}", DRIVER)]


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
    remedy = "pip install '.[gpu]' in Squadron's folder"
    return warning("attention", "neither triton nor flash-attn: slow on GPUs", remedy)
