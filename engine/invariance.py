"""`batch_invariant` on a GPU: a token's bits do not depend on what else is in its step."""

from __future__ import annotations

import logging
from importlib import import_module

from torch import nn

from engine.config import EngineConfig
from engine.errors import ConfigError
from parallel.linear import ParallelLinear
from parallel.methods import PlainLinear

logger = logging.getLogger(__name__)

MOST_RANKS = 2  # two numbers have one sum; how more are added depends on how many there are


def check_invariance(config: EngineConfig) -> None:
    """Raise `ConfigError` for what cannot be had together with `batch_invariant`."""
    if config.batch_invariant and config.tensor_parallel_size > MOST_RANKS:
        raise ConfigError(
            f"batch_invariant: tensor_parallel_size={config.tensor_parallel_size} ranks are summed in another order "
            f"in larger steps; use at most {MOST_RANKS}",
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
