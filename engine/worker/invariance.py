"""`batch_invariant` on a GPU: a token's bits do not depend on what else is in its step."""

from __future__ import annotations

import logging
from importlib import import_module

import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.triton_here import why_no_triton
from parallel.group import Group
from parallel.linear import ParallelLinear

logger = logging.getLogger(__name__)

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
    logger.info("products: %d by TritonLinear, of one tiling whatever the number of rows", len(layers))
