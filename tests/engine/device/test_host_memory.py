"""Weights that are freed while others load go back to the system, which other tensors' gaps do not."""

import ctypes
import os
import subprocess
import sys

import pytest

SCRIPT = """
import contextlib, resource, sys
from pathlib import Path

import torch

from engine.device.host_memory import weights_apart

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20

torch.ones(24 << 18)  # 24 MB are freed: from now on glibc takes what is smaller from its heap
context = weights_apart() if sys.argv[1] == "apart" else contextlib.nullcontext()
with context:
    weights = [torch.ones(1 << 19) for _ in range(40)]  # 2 MB each
    before = resident()
    del weights[::2]
    print(before - resident())
if sys.argv[1] == "apart":
    steps = [torch.ones(1 << 19) for _ in range(40)]
    before = resident()
    del steps[::2]
    print(before - resident())
"""


def given_back(how: str, **environment: str) -> list[int]:
    """Return the MB that half of 80 gave back, and after `weights_apart` half of others."""
    command, env = [sys.executable, "-c", SCRIPT, how], os.environ | environment
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_weights_that_are_freed_go_back_at_once_and_tensors_of_steps_do_not():
    loaded, later = given_back("apart")
    assert loaded >= 36
    assert later <= 8
    assert given_back("as usual")[0] <= 8
    assert given_back("apart", MALLOC_MMAP_THRESHOLD_="33554432")[0] <= 8
