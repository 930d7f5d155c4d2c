"""What the hardware allows: tokens/s that no engine can beat, from bytes that must move and sums to be made."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.gpu.loads import Load
from tests.bench.gpu.shapes import Shape

HALF = 2  # bytes of a bf16


@dataclass(frozen=True, slots=True)
class Limits:
    """bandwidth: bytes/s of the GPU's memory. flops: FLOP/s of bf16 matrix products."""

    bandwidth: float
    flops: float


# What a copy and a large product reach on an H200 (its data sheet says 4.8 TB/s and 989 TFLOP/s).
GIVEN = Limits(bandwidth=4.3e12, flops=790e12)


def decode_bytes(shape: Shape, batch: int, context: int, weight: float = HALF, kv: float = HALF) -> float:
    """Return the bytes that one decode step must read.

    The matrices of the layers and the head (in bf16) once, and K and V of `context` tokens of each sequence. weight,
    kv: bytes of an element of a layer, and of K and V. Rows of the embedding, norms, activations and the new K and V
    are left out: under 0.1 %.
    """
    weights = weight * shape.layer_weights + HALF * shape.head_weights
    return weights + kv * batch * context * shape.kv_per_token


def decode_limit(
    shape: Shape, batch: int, context: int, limits: Limits, weight: float = HALF, kv: float = HALF
) -> float:
    """Return the tokens/s of decoding `batch` sequences whose bytes come as fast as the memory gives them."""
    return batch * limits.bandwidth / decode_bytes(shape, batch, context, weight, kv)


def prefill_flop(shape: Shape, tokens: int, before: int = 0) -> float:
    """Return the FLOP of `tokens` prompt tokens of one sequence after `before` others, with the head of the last one.

    Two per weight and token; attention is causal: two products of four operations on half a square.
    """
    pairs = tokens * before + tokens * tokens / 2
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * pairs
    return 2.0 * shape.layer_weights * tokens + attention + 2.0 * shape.head_weights


def load_limit(shape: Shape, load: Load, limits: Limits) -> float:
    """Return the output tokens/s of a load that is all there from the start.

    Prompts at the rate of matrix products; then as many decode steps as the longest output has tokens, each reading
    the weights once and the K and V of the sequences that still run.
    """
    prefill = sum(prefill_flop(shape, len(prompt)) for prompt in load.prompts) / limits.flops
    weights = max(load.outputs) * decode_bytes(shape, 0, 0)
    pairs = zip(load.prompts, load.outputs, strict=True)
    contexts = sum(count * len(prompt) + count * (count - 1) // 2 for prompt, count in pairs)
    decode = (weights + HALF * contexts * shape.kv_per_token) / limits.bandwidth
    return sum(load.outputs) / (prefill + decode)
