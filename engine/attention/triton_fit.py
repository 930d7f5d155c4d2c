"""Whether the Triton kernels can serve a model here; needs no Triton."""

from __future__ import annotations

import importlib.util
import os

import torch

from engine.attention.base import AttentionSpec
from engine.attention.tuned import padded
from engine.kernels.triton_here import lacks, why_no_triton

MAX_HEAD_DIM = 256
MAX_GROUP = 128
MAX_QUERIES = 32 << 10  # bytes of a KV head's group of queries, which a program holds beside tiles of keys and values
LEAST_PAGE = 16
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert float8_e4m3fn


def why_not_triton(spec: AttentionSpec) -> str | None:
    """Return why the Triton kernels cannot serve this model here, None when they can."""
    return why_not_here(spec) or unfit_for_triton(spec)


def why_not_here(spec: AttentionSpec) -> str | None:
    """Return what the device or the installation lacks, None when nothing."""
    if spec.device.type == "cuda":
        return why_no_triton(spec.device) or _why_no_fp8_cache(spec)
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if spec.device.type == "cpu":
        return None if interpreted() else "it needs a CUDA device; TRITON_INTERPRET=1 runs it slowly on a CPU"
    return f"it is for CUDA devices, not for {spec.device.type}"


def unfit_for_triton(spec: AttentionSpec) -> str | None:
    """Return why the kernels serve no such model on any GPU, None when they do."""
    if spec.dtype not in DTYPES:
        return f"it computes in float32, bfloat16 or float16, not {str(spec.dtype).removeprefix('torch.')}"
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
        return f"head size {spec.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if spec.group > MAX_GROUP:
        return f"{spec.group} query heads share a KV head, more than {MAX_GROUP}"
    if padded(spec.group) * padded(spec.head_dim) * spec.dtype.itemsize > MAX_QUERIES:
        kind = str(spec.dtype).removeprefix("torch.")
        return f"{spec.group} query heads of size {spec.head_dim} in {kind} share a KV head, more than fit a program"
    if spec.block_size < LEAST_PAGE or spec.block_size & (spec.block_size - 1):
        return f"its pages are powers of two from {LEAST_PAGE} tokens, not {spec.block_size}; set block_size to 16"
    return None


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_no_fp8_cache(spec: AttentionSpec) -> str | None:
    found = torch.cuda.get_device_capability(spec.device)
    return lacks(FP8_CAPABILITY, found, "an fp8 cache") if spec.fp8_cache and found < FP8_CAPABILITY else None
