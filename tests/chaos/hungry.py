"""A rank that takes more memory than its control group has."""

from __future__ import annotations

import os
from pathlib import Path


def take_all(rank: int, group: str) -> None:
    """Join the control group at `group` and take memory until the kernel ends this process."""
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    taken = []
    while True:
        taken.append(bytearray(b"x") * 2**24)
