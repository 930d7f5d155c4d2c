"""Whether Triton's kernels can run on a GPU of this machine; needs no Triton."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

LEAST_CAPABILITY = (8, 0)
COMPILERS = ("gcc", "clang")  # that Triton looks for


def why_no_triton(device: torch.device) -> str | None:
    """Return what a CUDA device or the installation lacks, None when nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        return lacks(LEAST_CAPABILITY, found)
    # Triton compiles a small C program to launch each kernel by, on the machine that it runs on.
    if "CC" not in os.environ and not any(map(shutil.which, COMPILERS)):
        return "Triton needs a C compiler to launch kernels, and there is none; install gcc"
    if not _found_elsewhere() and not python_header().exists():
        return (
            f"Triton needs Python's headers to launch kernels, and there is no {python_header()}; install python3-dev"
        )
    return None


def python_header() -> Path:
    """Return where Triton looks for what that program includes."""
    scheme = sysconfig.get_default_scheme()
    # Debian's name for what pip installs; headers come with the system's Python.
    plain = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_path("include", plain), "Python.h")


def _found_elsewhere() -> bool:
    """Whether the compiler is told to look elsewhere, too."""
    return "CPATH" in os.environ or "C_INCLUDE_PATH" in os.environ


def lacks(least: tuple[int, int], found: tuple[int, int], what: str = "it") -> str:
    """Return that `what` needs a GPU of a higher compute capability."""
    return f"{what} needs compute capability {least[0]}.{least[1]}, this GPU has {found[0]}.{found[1]}"
