"""What launched ranks do in tests. Imports little, so that they start fast."""

from __future__ import annotations

import os
import signal
import sys


def wait(rank: int) -> None:
    """Do nothing until killed."""
    os.write(1, f"rank {rank} waits\n".encode())  # at once, whoever else writes a line
    signal.pause()


def fail(rank: int) -> None:
    """Fail as a rank does that finds a bad weight."""
    raise ValueError(f"rank {rank} has no such weight")


def finish(rank: int, path: str) -> None:
    """Leave a note and end."""
    with open(f"{path}.{rank}", "w") as file:
        file.write(" ".join([str(rank), str("torch" in sys.modules)]))
