"""Launched ranks that drive or answer a ring in tests."""

from __future__ import annotations

import os
import signal

from parallel.message_ring import SharedMemoryRing


def drive(rank: int, name_file: str) -> None:
    """Drive a ring: hand over its name, send one message and wait to be killed."""
    ring = SharedMemoryRing.create(1)
    ring.send(b"first", 1.0)
    with open(f"{name_file}.tmp", "w") as file:
        file.write(ring.name)
    os.rename(f"{name_file}.tmp", name_file)
    signal.pause()


def echo(rank: int, there: str, count: int, back: str) -> None:
    """Return what comes through ring `there`, `count` times, through the ring whose driver this is."""
    with SharedMemoryRing.create(1, spin=0.0) as answers, SharedMemoryRing.attach(there, 0, spin=0.0) as ring:
        with open(f"{back}.tmp", "w") as file:
            file.write(answers.name)
        os.rename(f"{back}.tmp", back)
        for _ in range(count):
            answers.send(ring.receive(10.0), 10.0)
