"""What the tests of a GPU say of the machine that they ran on."""

from __future__ import annotations

import torch

from tests.bench.gpu.machine import machine


def pytest_report_header() -> str:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    found = machine(device)
    facts = {"gpu": found.get("gpu", "none"), **found["versions"], **found.get("clocks", {})}
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)
