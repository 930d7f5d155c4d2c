"""What a run was made on: GPU, clocks, versions, date. A figure means little without."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "flash-attn")
ASKED = (
    "name",
    "driver_version",
    "pstate",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "ecc.mode.current",
)
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # as new drivers say it, and old ones


def machine(device: torch.device) -> dict[str, Any]:
    """Return date, versions, and of a GPU its kind and the state of its clocks."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda or "", **versions()},
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["clocks"] = clocks(device.index or 0)
    return found


def versions() -> dict[str, str]:
    """Return the versions of what is installed of the packages that figures depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def clocks(index: int) -> dict[str, str]:
    """Return what `nvidia-smi` says of clocks, power, heat and what holds clocks down; {} where there is none."""
    for reasons in REASONS:
        asked = (*ASKED, reasons)
        command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return dict(zip(asked, (value.strip() for value in run.stdout.split(",")), strict=False))
    return {}
