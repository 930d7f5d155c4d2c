"""What of this CPU's instructions the kernels are compiled for, and the kernels compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from parallel.c_library import compile_library, processor

if TYPE_CHECKING:
    import ctypes

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
ISA_VARIABLE = "SQUADRON_CPU_ISA"
# What kernels may use of an x86 CPU: gcc's name of the machine, and a flag of /proc/cpuinfo that says who has it.
ISAS = {
    "avx2": ("x86-64-v3", "avx2"),
    "avx512": ("x86-64-v4", "avx512vl"),
    "avx512_bf16": ("cooperlake", "avx512_bf16"),
    "amx": ("sapphirerapids", "amx_bf16"),
}
NATIVE = "native"


def isas() -> list[str]:
    """Return the values of `SQUADRON_CPU_ISA` that this CPU can be taken for, `native` not among them."""
    flags = {flag for line in processor() for flag in line.split()}
    return [name for name, (_, flag) in ISAS.items() if flag in flags]


def chosen_isa() -> str:
    """Return what kernels may use of the CPU: all, `native`, or what `SQUADRON_CPU_ISA` says.

    It concerns our own kernels. `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` say the same to oneDNN and torch.
    Raises `ConfigError` for what this CPU lacks.
    """
    isa = os.environ.get(ISA_VARIABLE, NATIVE)
    if isa != NATIVE and isa not in isas():
        here = ", ".join((NATIVE, *isas()))
        raise ConfigError(f"{ISA_VARIABLE}={isa} is unknown, or this CPU does not have it; use {here}", ISA_VARIABLE)
    return isa


def _machine_flag() -> str:
    isa = chosen_isa()
    return f"-march={NATIVE if isa == NATIVE else ISAS[isa][0]}"


def load_library(sources: Sequence[str], macros: Mapping[str, int]) -> ctypes.CDLL | None:
    """Return `sources`, files of this folder, compiled with `macros`, or None where they cannot be; why is logged.

    The library shares torch's threads: it asks for the OpenMP runtime that torch has loaded before.
    """
    files = [FOLDER / name for name in sources]
    return compile_library(files, (*FLAGS, _machine_flag()), macros, "torch's operations are used")
