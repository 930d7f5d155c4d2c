"""A script: prints what multiplies by quantised weights here, as one JSON object."""

from __future__ import annotations

import json
from typing import Any

import torch

from engine.kernels.compiler import chosen_isa, isas
from engine.kernels.native_linear import product_library
from engine.quantization.fp8 import LEAST_CAPABILITY


def read() -> dict[str, Any]:
    """Return whether there is a GPU and whether it multiplies fp8; else for what of the CPU products are compiled.

    compiled: the widest instructions that are used, None where nothing can be compiled.
    """
    if torch.cuda.is_available():
        return {"gpu": True, "fp8": torch.cuda.get_device_capability(0) >= LEAST_CAPABILITY}
    compiled = product_library(torch.float32) is not None
    isa = chosen_isa()
    widest = (isas() or ["this CPU"])[-1] if isa == "native" else isa
    return {"gpu": False, "fp8": False, "compiled": widest if compiled else None}


if __name__ == "__main__":
    print(json.dumps(read()))
