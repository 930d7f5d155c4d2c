"""What decides the last bits of a token's logits beside weights and dtype, and so which of two near ones is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from engine.config import EngineConfig
from engine.loader.fingerprint import sources_digest
from parallel.group import Group
from parallel.linear import ParallelLinear

LIBRARIES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-3", "xgrammar")
NOT_COMPUTING = ("num_", "l1", "l2", "l3")  # what torch tells of a CPU beside its instructions: cores and caches


def arithmetic_of(config: EngineConfig, model: nn.Module, group: Group, attention: str) -> Mapping[str, str]:
    """Return it in words by name, of rank 0. config: resolved. attention: the backend's name.

    Where all of it is equal, so are the products, sums and kernels that a token takes in a step of the same shape.
    Not in it: caches and clocks of processors, drivers, and on which node what runs.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    kernels = {type(layer.kernels).__name__ for layer in model.modules() if hasattr(layer, "kernels")}
    return {
        "code": sources_digest(),
        "libraries": ", ".join(f"{name} {found}" for name in LIBRARIES if (found := _version(name)) is not None),
        "device": _device(group.device),
        "tensor_parallel_size": str(group.size),
        "attention": attention,
        "kernels": ", ".join(sorted(kernels)),
        "products": ", ".join(sorted(Counter(type(layer.method).__name__ for layer in layers))),
        "kv_cache_dtype": config.kv_cache_dtype,
        "batch_invariant": str(config.batch_invariant),
    }


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
    probe = getattr(torch.cpu, "get_capabilities", None)  # newer than torch 2.11
    found = probe() if probe else {}
    can = sorted(f"{name}={value}" for name, value in found.items() if value and not name.startswith(NOT_COMPUTING))
    # A product of many rows is cut by the number of threads, and so are its sums.
    return ", ".join([torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads", *can])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
