"""What this GPU reaches at best: every other figure is told as a share of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.bench.gpu.bench import Bench, NotHere
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import GIVEN
from tests.bench.gpu.timing import seconds_per_call

BANDWIDTH = GIVEN.bandwidth / 1e12
RATE = GIVEN.flops / 1e12

FIGURES = (
    Figure("limits/copy", "copy on the device, bytes read and written", "TB/s", lambda _: BANDWIDTH),
    Figure("limits/read", "sum of a large array, bytes read", "TB/s", lambda _: BANDWIDTH),
    Figure("limits/bf16", "product of two large bf16 squares", "TFLOP/s", lambda _: RATE),
    Figure("limits/fp8", "the same in fp8, scaled by row", "TFLOP/s", lambda _: 2 * RATE),
    Figure("limits/pinned", "copy from pinned host memory", "GB/s"),
)


def run(bench: Bench) -> None:
    """Measure them all."""
    bench.measure(lambda: _copy(bench), "limits/copy")
    bench.measure(lambda: _read(bench), "limits/read")
    bench.measure(lambda: _product(bench, torch.matmul, torch.bfloat16), "limits/bf16")
    bench.measure(lambda: _fp8(bench), "limits/fp8")
    bench.measure(lambda: _pinned(bench), "limits/pinned")


def _copy(bench: Bench) -> list[float]:
    source, target = (torch.ones(bench.scale.copy, dtype=torch.int8, device=bench.device) for _ in range(2))
    times = seconds_per_call([lambda: target.copy_(source)], bench.device, bench.scale.repeats)
    return [2 * bench.scale.copy / seconds / 1e12 for seconds in times]


def _read(bench: Bench) -> list[float]:
    source = torch.ones(bench.scale.copy // 4, dtype=torch.float32, device=bench.device)
    times = seconds_per_call([source.sum], bench.device, bench.scale.repeats)
    return [bench.scale.copy / seconds / 1e12 for seconds in times]


def _product(bench: Bench, multiply: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[float]:
    """Random numbers, as in weights: the product of zeros takes less power and runs at higher clocks."""
    side = bench.scale.side
    pairs = [[torch.randn(side, side, device=bench.device).to(dtype) for _ in range(2)] for _ in range(2)]
    calls = [lambda a=a, b=b: multiply(a, b) for a, b in pairs]
    # As long as it takes to be held by power and heat, as an engine that serves is.
    times = seconds_per_call(calls, bench.device, bench.scale.repeats, warm_seconds=2.0)
    return [2 * side**3 / seconds / 1e12 for seconds in times]


def _fp8(bench: Bench) -> list[float]:
    if not bench.on_gpu:
        raise NotHere("needs a CUDA device")
    ones = torch.ones(bench.scale.side, 1, device=bench.device)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(
            a, b.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return _product(bench, multiply, torch.float8_e4m3fn)


def _pinned(bench: Bench) -> list[float]:
    if not bench.on_gpu:
        raise NotHere("needs a CUDA device")
    size = bench.scale.copy // 4
    source = torch.ones(size, dtype=torch.int8, pin_memory=True)
    target = torch.empty(size, dtype=torch.int8, device=bench.device)
    calls = [lambda: target.copy_(source, non_blocking=True)]
    return [size / seconds / 1e9 for seconds in seconds_per_call(calls, bench.device, bench.scale.repeats)]


PART = Part("limits", "Limits of this machine", FIGURES, run)
