"""What a figure was measured on: it means little without."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.device.machine import cores


def provenance() -> dict[str, Any]:
    """Return machine, versions and date, as they stand beside every figure in bench.json."""
    return {
        "machine": {"cpu": cpu_model(), "cores": cores(), "load_before": round(os.getloadavg()[0], 1)},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("squadron", "torch", "ray", "transformers", "numpy")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """Return the CPU's name, with the matrix units that decide what bf16 costs."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    units = [
        unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in facts.get("flags", "").split()
    ]
    family = f"family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
    return f"{facts.get('model name', platform.machine())}, {family}, {' '.join(units)}"
