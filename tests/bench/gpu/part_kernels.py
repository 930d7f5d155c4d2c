"""The small kernels of a layer and the draw of tokens: ours, torch's, and what `torch.compile` makes of torch's.

Each is bound by memory: the limit is the bytes that it must read and write, once.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.inputs.dummy_steps import dummy_sampling
from engine.kernels.base import Kernels, TorchKernels
from engine.sampling.sampler import sample
from tests.bench.gpu.bench import Bench, NotHere
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import HALF, Limits
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.shapes import Shape
from tests.bench.gpu.timing import rotations, seconds_per_call

MODEL = "qwen3-8b"
KINDS = ("triton", "torch", "compiled")
EPS = 1e-6
FP32 = 4
DRAWN_BY = ("triton", "torch")
DRAWS = {"temperature": (0, 1.0), "top-k-and-p": (50, 0.95), "top-p-alone": (0, 0.95)}  # top_k, top_p


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation. elements: of bf16 that it reads and writes per row."""

    name: str
    what: str
    elements: int


def part(scale: Scale) -> Part:
    """Return the kernels at the sizes of the largest shape."""
    shape = scale.shape(MODEL)
    rows = scale.rows[-2:]
    layers = [_figure(one, kind, count) for one in kernels(shape) for count in rows for kind in KINDS]
    draws = [_draw_figure(shape, name, kind, scale.batches[-1]) for name in DRAWS for kind in DRAWN_BY]
    title = f"Small kernels, {MODEL}"
    return Part("kernels", title, (*layers, *draws), lambda bench: _run(bench, shape))


def kernels(shape: Shape) -> list[Kernel]:
    """Return the operations that stand beside products and attention."""
    merged = (shape.heads + shape.kv_heads) * shape.head_dim
    return [
        Kernel("add-norm", "residual + x, and its RMS norm", 4 * shape.hidden),
        Kernel("norm-rotate", "norms and rotation of queries and keys", 2 * merged),
        Kernel("gate", "SiLU(gate) * up", 3 * shape.intermediate),
    ]


def _name(kernel: str, kind: str, rows: int) -> str:
    return f"kernels/{kernel}/{kind}/{rows}"


def _figure(kernel: Kernel, kind: str, rows: int) -> Figure:
    def limit(limits: Limits) -> float:
        return 1e6 * HALF * kernel.elements * rows / limits.bandwidth

    return Figure(_name(kernel.name, kind, rows), f"{kernel.what}, {rows:,} rows, {kind}", "us", limit, higher=False)


def _draw_figure(shape: Shape, name: str, kind: str, rows: int) -> Figure:
    def limit(limits: Limits) -> float:
        return 1e6 * FP32 * shape.vocab * rows / limits.bandwidth

    what = f"draw of {rows:,} tokens, {name.replace('-', ' ')}, with its launches, {kind}"
    return Figure(_name(f"draw-{name}", kind, rows), what, "us", limit, higher=False)


def _run(bench: Bench, shape: Shape) -> None:
    for kernel in kernels(shape):
        for rows in bench.scale.rows[-2:]:
            for kind in KINDS:
                bench.measure(
                    lambda kernel=kernel, rows=rows, kind=kind: _micros(bench, shape, kernel, kind, rows),
                    _name(kernel.name, kind, rows),
                )
    rows = bench.scale.batches[-1]
    for name, filters in DRAWS.items():
        for kind in DRAWN_BY:
            bench.measure(
                lambda filters=filters, kind=kind: _draw_micros(bench, shape, kind, rows, *filters),
                _name(f"draw-{name}", kind, rows),
            )


def _micros(bench: Bench, shape: Shape, kernel: Kernel, kind: str, rows: int) -> list[float]:
    method, inputs = OPERATIONS[kernel.name]
    ours = _implementation(bench, kind)
    operation = getattr(ours, method)
    if kind == "compiled":
        operation = torch.compile(operation, dynamic=False)
    sets = rotations(HALF * kernel.elements * rows) if bench.on_gpu else 2
    given = [inputs(ours, shape, rows, bench.device) for _ in range(sets)]
    calls = [lambda one=one: operation(*one) for one in given]
    times = seconds_per_call(calls, bench.device, bench.scale.repeats, graph=True)
    return [1e6 * seconds for seconds in times]


def _implementation(bench: Bench, kind: str) -> Kernels:
    """Return the kernels whose operations are measured. Raises `NotHere`."""
    if kind != "torch" and not bench.on_gpu:
        raise NotHere("needs a CUDA device")
    if kind == "triton":
        found: Kernels = importlib.import_module("engine.kernels.triton_kernels").TritonKernels()
        return found
    return TorchKernels()


def _add_norm(_: Kernels, shape: Shape, rows: int, device: torch.device) -> tuple[Any, ...]:
    residual, x = (_random(device, rows, shape.hidden) for _ in range(2))
    return residual, x, _random(device, shape.hidden), EPS


def _norm_rotate(ours: Kernels, shape: Shape, rows: int, device: torch.device) -> tuple[Any, ...]:
    heads = shape.heads + shape.kv_heads
    # As the merged product leaves them: values lie between the queries and keys of one token and of the next.
    merged = _random(device, rows, heads + shape.kv_heads, shape.head_dim)[:, :heads]
    rotation = ours.rotation(_random(device, rows, 2, shape.head_dim // 2).float())
    return merged, _random(device, heads, shape.head_dim), rotation, EPS


def _admission(_: Kernels, shape: Shape, rows: int, device: torch.device) -> tuple[Any, ...]:
    return (_random(device, rows, 2 * shape.intermediate),)


# Of `Kernels`, and what makes its arguments.
OPERATIONS = {
    "add-norm": ("add_rms_norm", _add_norm),
    "norm-rotate": ("norm_rotate", _norm_rotate),
    "gate": ("silu_gate", _admission),
}


def _draw_micros(bench: Bench, shape: Shape, kind: str, rows: int, top_k: int, top_p: float) -> list[float]:
    """Return microseconds of a draw, the host's work included: its parameters come from there."""
    if kind == "triton" and not bench.on_gpu:
        raise NotHere("needs a CUDA device")
    draws = importlib.import_module("engine.kernels.triton_sampler").TritonDraws() if kind == "triton" else None
    logits = [torch.randn(rows, shape.vocab, device=bench.device).mul_(3) for _ in range(2)]
    inputs = dummy_sampling(rows)
    inputs.top_k, inputs.top_p = np.full(rows, top_k, np.int32), np.full(rows, top_p, np.float32)
    calls = [lambda one=one: sample(one, inputs, draws) for one in logits]
    times = seconds_per_call(calls, bench.device, bench.scale.repeats, launches=True)
    return [1e6 * seconds for seconds in times]


def _random(device: torch.device, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
