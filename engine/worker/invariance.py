"""What decides the last bits of a token's logits, and so which of two near ones is drawn.

`arithmetic_of` names all that does, beside weights and dtype. With `batch_invariant` on a GPU a token's bits do not
depend on what else is in its step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from engine.config import EngineConfig
from engine.device.gpu import why_no_triton
from engine.errors import ConfigError
from engine.kernels.compiler import chosen_isa
from engine.kernels.native import NativeKernels
from engine.kernels.native_linear import PanelLinear
from engine.layers.mla import HeadProducts
from engine.layers.moe import Experts
from engine.loader.fingerprint import sources_digest
from parallel.group import Group
from parallel.linear import ParallelLinear

logger = logging.getLogger(__name__)


LIBRARIES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-3", "xgrammar")
NOT_COMPUTING = ("num_", "l1", "l2", "l3")  # what torch reports of a CPU beside its instructions: cores and caches


def arithmetic_of(
    config: EngineConfig, model: nn.Module, group: Group, attention: str, sampling: str
) -> Mapping[str, str]:
    """Return it in words by name, of rank 0. config: resolved. attention, sampling: what computes them, by name.

    Where all of it is equal, so are the products, sums and kernels that a token takes in a step of the same shape.
    Not in it: caches and clocks of processors, drivers, and on which node what runs.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    kernels = {type(layer.kernels).__name__ for layer in model.modules() if hasattr(layer, "kernels")}
    # A product or an attention of torch's goes by more of a CPU than its level.
    ours = attention == "native" and kernels == {NativeKernels.__name__}
    ours &= all(isinstance(layer.method, PanelLinear) for layer in layers)
    ours &= not any(isinstance(part, Experts | HeadProducts) for part in model.modules())
    return {
        "code": sources_digest(),
        "libraries": ", ".join(f"{name} {found}" for name in LIBRARIES if (found := _version(name)) is not None),
        "device": _device(group.device, ours),
        "layers": type(model).__name__,
        "tensor_parallel_size": str(group.size),
        "attention": attention,
        "sampling": sampling,
        "kernels": ", ".join(sorted(kernels)),
        "products": ", ".join(sorted({layer.method.describe() for layer in layers})),
        "kv_cache_dtype": config.kv_cache_dtype,
        "batch_invariant": str(config.batch_invariant),
    }


def _device(device: torch.device, ours: bool) -> str:
    """Return what of it decides bits; ours: whether kernels of our own compute all that is summed."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
    probe = getattr(torch.cpu, "get_capabilities", None)  # newer than torch 2.11
    found = probe() if probe and not ours else {}
    can = sorted(f"{name}={value}" for name, value in found.items() if value and not name.startswith(NOT_COMPUTING))
    # A product of torch's of many rows is cut by the number of threads, and so are its sums.
    threads = f"{torch.get_num_threads()} threads"
    return ", ".join([f"kernels for {chosen_isa()}", torch.backends.cpu.get_cpu_capability(), threads, *can])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


MOST_RANKS = 2  # two numbers have one sum, in whatever order


def check_invariance(config: EngineConfig, group: Group) -> None:
    """Raise `ConfigError` for what cannot be had together with `batch_invariant` here. config: resolved."""
    if not config.batch_invariant:
        return
    if group.device.type == "cuda":
        _check_gpu(config, group.device)
    if group.size > MOST_RANKS:
        _check_sums(config, group)


def _check_gpu(config: EngineConfig, device: torch.device) -> None:
    if config.quantization is not None:
        raise ConfigError(
            f"batch_invariant: products with weights in {config.quantization} depend on the batch on a GPU; use the "
            "unquantised checkpoint, without quantization",
            "batch_invariant",
        )
    reason = why_no_triton(device)
    if reason is not None:
        raise ConfigError(f"batch_invariant needs Triton's kernels on a GPU: {reason}", "batch_invariant")


def _check_sums(config: EngineConfig, group: Group) -> None:
    size = group.size
    if not group.sums_in_order:
        raise ConfigError(
            f"batch_invariant: the sum over tensor_parallel_size={size} ranks has another order in larger steps, and "
            f"these ranks share no memory that it could be fixed in; use at most {MOST_RANKS}",
            "batch_invariant",
        )
    if group.device.type == "cuda" and config.dtype == "float16":
        raise ConfigError(
            f"batch_invariant: sums of float16 over tensor_parallel_size={size} GPUs have no fixed order; "
            "set dtype=bfloat16",
            "batch_invariant",
        )


def fix_products(model: nn.Module) -> None:
    """Multiply by every weight of a model on a GPU with one tiling, whatever the number of rows. All are plain."""
    make = import_module("engine.kernels.triton_linear").TritonLinear
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    for layer in layers:
        layer.method = make(layer.weight)
    for part in model.modules():
        if isinstance(part, Experts) and part.grouped is not None:
            for product in part.grouped:
                product.fix_tiling()
    logger.info("products: %d by TritonLinear, of one tiling whatever the number of rows", len(layers))
