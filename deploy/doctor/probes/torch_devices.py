"""A script: prints what torch sees of GPUs and NCCL, as one JSON object."""

from __future__ import annotations

import importlib.util
import json
import warnings
from typing import Any

import torch
import torch.distributed


def read() -> dict[str, Any]:
    """Return versions, GPUs and what torch complains of; bytes are of the GPU."""
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        gpus = [_gpu(index) for index in range(torch.cuda.device_count())] if available else []
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "available": available,
        "gpus": gpus,
        "nccl": nccl,
        "triton": importlib.util.find_spec("triton") is not None,
        "flash_attn": importlib.util.find_spec("flash_attn") is not None,
        "complaint": str(complaints[0].message).splitlines()[0] if complaints else "",
    }


def _gpu(index: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(index)
    return {"name": torch.cuda.get_device_name(index), "free": free, "total": total}


if __name__ == "__main__":
    print(json.dumps(read()))
