"""What a run was made on and of: GPU, clocks, versions, commit, date. A figure means little without."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu.clocks import clocks

PACKAGES = ("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "flash-attn")
ROOT = Path(__file__).parents[3]


def machine(device: torch.device) -> dict[str, Any]:
    """Return date, commit, versions, and of a GPU its kind and the state of its clocks."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
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


def commit() -> str:
    """Return the commit of this code, "+" after it where it was changed since; "" where nobody knows."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
