"""The engines that are compared: what runs each, in which environment, and as which instruction set."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.bench.offline import THREADS
from tests.bench.peers.environments import missing

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
OURS = "Squadron"
# What the CPU is taken for -> the variables that say so.
ISAS: dict[str, Mapping[str, str]] = {
    "native": {},
    "avx512": {
        "SQUADRON_CPU_ISA": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx2": {
        "SQUADRON_CPU_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of the table.

    script: what runs in its environment, where `environment` is None in this one. converter: a script that is called
    with the checkpoint, a path and the dtype, and makes the engine's own format there; one for all plain dtypes,
    unless the engine `converts_each`. quantises: whether it has weights in int8 and int4. reads_copies: whether it
    gets them from what `squadron quantize` has written.
    """

    name: str
    script: str
    environment: str | None = None
    converter: str | None = None
    converts_each: bool = False
    quantises: bool = False
    reads_copies: bool = False


ENGINES = {
    "squadron": Engine(OURS, "run_squadron.py", quantises=True),
    "vllm": Engine("vLLM", "run_vllm.py", "vllm", quantises=True, reads_copies=True),
    "openvino": Engine("OpenVINO GenAI", "run_openvino.py", "openvino", "make_ir.py", quantises=True),
    "llama.cpp": Engine(
        "llama.cpp", "run_llama_cpp.py", "llama.cpp", "make_gguf.py", converts_each=True, quantises=True
    ),
    "generate": Engine("transformers, generate", "run_transformers.py"),
    "continuous": Engine("transformers, continuous", "run_continuous.py"),
}
LIMITS = Engine("limits", "run_limits.py")
# What an engine does of what `--isa` says, other than all of it.
PARTLY = {
    "OpenVINO GenAI": "its attention asks the CPU itself, so that it may use more than `--isa` says",
    "llama.cpp": "was compiled for AVX2",
}


def for_isa(engine: Engine, isa: str) -> Engine:
    """Return the engine as this instruction set wants it: what llama.cpp uses is chosen when it is compiled."""
    return replace(engine, environment="llama.cpp-avx2") if engine.name == "llama.cpp" and isa == "avx2" else engine


def absent(engine: Engine, isa: str, root: Path) -> str | None:
    """Return why the engine cannot be asked, or None where it can."""
    if engine.name == "llama.cpp" and isa == "avx512":
        return "it can be compiled for this CPU or for AVX2; --isa avx512 is neither"
    return missing(engine.environment, root) if engine.environment else None


def variables(engine: Engine, isa: str, root: Path) -> dict[str, str]:
    """Return the environment of a process: two threads, one instruction set, and no network."""
    ours = {name for each in ISAS.values() for name in each}
    result = {name: value for name, value in os.environ.items() if name not in ours} | ISAS[isa]
    result |= {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    if engine.environment is None:
        result["PYTHONPATH"] = str(REPOSITORY)
    else:
        result.pop("PYTHONPATH", None)
        # Programs of the environment (a compiler's helper, for one) before those of this one.
        result["PATH"] = f"{root / engine.environment / 'bin'}{os.pathsep}{result.get('PATH', '')}"
    if engine.environment == "vllm":
        result |= for_vllm(root / "vllm", isa)
    return result


def for_vllm(environment: Path, isa: str = "native") -> dict[str, str]:
    """Return what vLLM's documentation asks for, and where it keeps what it compiles."""
    allocator = ctypes.util.find_library("tcmalloc_minimal")
    return {
        "VLLM_CACHE_ROOT": str(environment / f"cache-{isa}"),
        "TORCHINDUCTOR_CACHE_DIR": str(environment / f"inductor-{isa}"),
        "LD_PRELOAD": ":".join([str(environment / "lib" / "libiomp5.so"), *filter(None, [allocator])]),
    }
