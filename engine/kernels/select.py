"""Chooses the kernels of a model and of its sampling, and says which and why."""

from __future__ import annotations

import logging
from importlib import import_module

import torch

from engine.device.gpu import why_no_triton
from engine.kernels.base import Kernels, TorchKernels
from engine.kernels.native import NativeKernels, native_library, why_not_native
from engine.kernels.native_linear import product_library
from engine.kernels.native_sampler import NativeDraws, draw_library
from engine.sampling.gumbel import TokenDraws

logger = logging.getLogger(__name__)


def select_kernels(head_dim: int, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return what is compiled for this CPU, or Triton's on CUDA, where they can be had; else torch's operations."""
    if device.type == "cuda":
        return _on_cuda(device)
    reason = why_not_native(head_dim, dtype, device)
    library = None if reason else native_library(head_dim, dtype)
    products = None if library is None else product_library(dtype)
    if library is None or products is None:
        logger.info(
            "kernels: torch's operations%s", f"; the compiled ones cannot be used: {reason}" if reason else ""
        )
        return TorchKernels()
    logger.info("kernels: compiled for this CPU")
    return NativeKernels(library, products, dtype, torch.get_num_threads())


def select_draws(device: torch.device) -> TokenDraws | None:
    """Return what draws tokens best on `device`; None = torch's operations."""
    if device.type == "cpu":
        return _on_cpu()
    if device.type != "cuda":
        return None
    reason = why_no_triton(device)
    if reason is not None:
        logger.warning("sampling: torch's operations; Triton's cannot be used: %s", reason)
        return None
    found: TokenDraws = import_module("engine.kernels.triton_sampler").TritonDraws()
    return found


def _on_cpu() -> TokenDraws | None:
    library = draw_library()
    logger.info("sampling: %s", "torch's operations" if library is None else "compiled for this CPU")
    return None if library is None else NativeDraws(library, torch.get_num_threads())


def _on_cuda(device: torch.device) -> Kernels:
    reason = why_no_triton(device)
    if reason is not None:
        logger.warning("kernels: torch's operations; Triton's cannot be used: %s", reason)
        return TorchKernels()
    found: Kernels = import_module("engine.kernels.triton_kernels").TritonKernels()
    logger.info("kernels: Triton's")
    return found
