"""Compiles Triton kernels for GPUs that are not there, as their launches would; `ptxas` comes with Triton.

Its use needs a process of its own where the interpreter is on: see `compiled`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def compiled(module: str) -> list[dict]:
    """Run `python -m MODULE` for the compiler; it prints `show` of what it launched."""
    run = subprocess.run(
        [sys.executable, "-m", module],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@contextmanager
def instead_of_launching(capability: int) -> Iterator[list]:
    """Launches inside compile for a GPU of this compute capability (90 = 9.0); yields (name, kernel) of each."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return capability  # Triton keeps what it compiled by the device's number

        def get_current_stream(self, device):
            return 0

    kernels = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append((self.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run


def show(case: str, name: str, kernel: object, **more: int) -> None:
    """Print what a kernel takes: registers per thread, bytes spilled per thread, bytes of shared memory; how many
    instructions for the matrix units it has, and whether a quotient of it is off by a bit at times; how many loads it
    leaves on their way each time that it waits for one; and more.
    """
    import triton

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    target = re.search(r"\.target (\w+)", kernel.asm["ptx"])[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [ptxas, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = (int(re.search(rf"(\d+) bytes spill {what}", said)[1]) for what in ("stores", "loads"))
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    found = {"registers": registers, "spilled": max(stores, loads), "shared": kernel.metadata.shared}
    found["products"] = len(re.findall(r"mma\.(?:sync|mma_async)", kernel.asm["ptx"]))
    found["inexact"] = "div.full.f32" in kernel.asm["ptx"]
    found["stages"] = kernel.metadata.num_stages
    found["left"] = [int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.asm["ptx"])]
    print(json.dumps({"case": case, "kernel": name, **found, **more}))
