"""For which level of CPUs the kernels are compiled, and the kernels compiled.

A level is named, never "all that this CPU has": two machines of one level give the same bits.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from parallel.c_library import Proof, compile_library, processor

if TYPE_CHECKING:
    import ctypes

FOLDER = Path(__file__).parent
FLAGS = ("-fopenmp", "-Wno-psabi", "-mtune=generic")
ISA_VARIABLE = "SQUADRON_CPU_ISA"
V3 = "avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
# What kernels may use of an x86 CPU: how a compiler calls it, and the flags of /proc/cpuinfo that say who has it.
ISAS = {
    "avx2": (("-march=x86-64-v3",), V3),
    "avx512": (("-march=x86-64-v4",), V4),
    "avx512_bf16": (("-march=x86-64-v4", "-mavx512bf16"), f"{V4} avx512_bf16"),
    "amx": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        f"{V4} avx512_bf16 amx_tile amx_bf16",
    ),
}
# What every CPU of a kind has, for those that have none of these.
LEAST = {"x86_64": "x86-64", "aarch64": "armv8-a"}
NATIVE = "native"  # the last of those that this CPU has


def isas() -> list[str]:
    """Return the values of `SQUADRON_CPU_ISA` that this CPU can be taken for, `native` not among them."""
    flags = {flag for line in processor() for flag in line.split()}
    return [name for name, (_, wanted) in ISAS.items() if flags.issuperset(wanted.split())]


def chosen_isa() -> str:
    """Return the level that kernels are compiled for: what `SQUADRON_CPU_ISA` says, else the last that this CPU has.

    It concerns our own kernels. `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` say the same to oneDNN and torch.
    Raises `ConfigError` for what this CPU lacks.
    """
    isa, here = os.environ.get(ISA_VARIABLE, NATIVE), isas()
    if isa == NATIVE:
        return here[-1] if here else LEAST.get(platform.machine(), platform.machine())
    if isa not in here:
        values = ", ".join((NATIVE, *here))
        raise ConfigError(
            f"{ISA_VARIABLE}={isa} is unknown, or this CPU does not have it; use {values}", ISA_VARIABLE
        )
    return isa


def _machine_flags() -> Sequence[str]:
    isa = chosen_isa()
    if isa in ISAS:
        return ISAS[isa][0]
    return (f"-march={isa}",) if isa in LEAST.values() else ()


def load_library(sources: Sequence[str], macros: Mapping[str, int], proof: Proof | None = None) -> ctypes.CDLL | None:
    """Return `sources`, files of this folder, compiled with `macros`, or None where they cannot be; why is logged.

    The library shares torch's threads: it asks for the OpenMP runtime that torch has loaded before. proof: as of
    `compile_library`.
    """
    files = [FOLDER / name for name in sources]
    return compile_library(files, (*FLAGS, *_machine_flags()), macros, "torch's operations are used", proof)
