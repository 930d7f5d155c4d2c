"""`batch_invariant` on a GPU: a token's bits do not depend on what else is in its step."""

from __future__ import annotations

import logging
from importlib import import_module

from torch import nn

from engine.config import EngineConfig
from engine.errors import ConfigError
from parallel.group import Group
from parallel.linear import ParallelLinear
from parallel.methods import PlainLinear

logger = logging.getLogger(__name__)

MOST_RANKS = 2  # two numbers have one sum, in whatever order


def check_invariance(config: EngineConfig, group: Group) -> None:
    """Raise `ConfigError` for what cannot be had together with `batch_invariant` between these ranks."""
    size = group.size
    if not config.batch_invariant or size <= MOST_RANKS:
        return
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
    """Multiply by every weight of a model on a GPU with one tiling, whatever the number of rows.

    Raises `ConfigError` naming `batch_invariant` for weights that are not plain, and where Triton is not installed.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    for layer in layers:
        if not isinstance(layer.method, PlainLinear):
            raise ConfigError(
                f"batch_invariant: products by {type(layer.method).__name__} are not; use weights as they are",
                "batch_invariant",
            )
    try:
        make = import_module("engine.kernels.triton_linear").TritonLinear
    except ImportError as error:
        raise ConfigError(f"batch_invariant needs the package triton on a GPU: {error}", "batch_invariant") from error
    for layer in layers:
        layer.method = make(layer.weight)
    logger.info("products: %d by TritonLinear, of one tiling whatever the number of rows", len(layers))
