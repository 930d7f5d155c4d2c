"""A script: prints what multiplies by quantised weights here, as one JSON object."""

from __future__ import annotations

import json
import logging
from logging.handlers import BufferingHandler
from typing import Any

import torch

from engine.kernels.compiler import chosen_isa
from engine.kernels.native_linear import product_library
from engine.quantization.fp8 import LEAST_CAPABILITY


def read() -> dict[str, Any]:
    """Return whether there is a GPU and whether it multiplies fp8; else for what of the CPU products are compiled.

    compiled: the level of CPUs that they are for, None where there are none; why: what was told of it, one text.
    """
    if torch.cuda.is_available():
        return {"gpu": True, "fp8": torch.cuda.get_device_capability(0) >= LEAST_CAPABILITY}
    told, log = BufferingHandler(100), logging.getLogger("parallel.c_library")
    log.setLevel(logging.INFO)
    log.addHandler(told)
    compiled = product_library(torch.float32) is not None
    why = "; ".join(record.getMessage() for record in told.buffer)
    return {"gpu": False, "fp8": False, "compiled": chosen_isa() if compiled else None, "why": why}


if __name__ == "__main__":
    print(json.dumps(read()))
