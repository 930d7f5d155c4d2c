"""The products of one layer with weights in bf16, fp8 and int8, from one row to a whole chunk of a prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.select import select_kernels
from engine.quantization.fp8 import Fp8Linear
from engine.quantization.select import METHODS
from parallel.linear import LinearMethod, PlainLinear
from tests.bench.gpu.bench import Bench, NotHere
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import HALF, Limits
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.shapes import Shape
from tests.bench.gpu.timing import seconds_per_call

MODEL = "qwen3-8b"
BYTES = {"bf16": HALF, "fp8": 1, "int8": 1}  # of a weight


def part(scale: Scale) -> Part:
    """Return the products of one layer of the largest shape."""
    shape = scale.shape(MODEL)
    figures = tuple(_figure(shape, form, rows) for rows in scale.rows for form in BYTES)
    title = f"Products of one layer, {MODEL} (query/key/value, output, gate and up, down)"
    return Part("products", title, figures, lambda bench: _run(bench, shape))


def _name(form: str, rows: int) -> str:
    return f"products/{form}/{rows}"


def _figure(shape: Shape, form: str, rows: int) -> Figure:
    def limit(limits: Limits) -> float:
        """Whichever takes longer: reading the weights, or multiplying; fp8 multiplies at twice the rate."""
        elements = shape.layer_weights / shape.layers
        rate = limits.flops * (2 if form == "fp8" else 1)
        return 1e6 * max(BYTES[form] * elements / limits.bandwidth, 2 * elements * rows / rate)

    return Figure(_name(form, rows), f"{form}, {rows:,} rows", "us", limit, higher=False)


def _run(bench: Bench, shape: Shape) -> None:
    for rows in bench.scale.rows:
        for form in BYTES:
            bench.measure(lambda form=form, rows=rows: _micros(bench, shape, form, rows), _name(form, rows))


def _micros(bench: Bench, shape: Shape, form: str, rows: int) -> list[float]:
    """Return microseconds of a layer's products, with what turns activations into what they multiply."""
    layers = 2 if rows > 1024 or not bench.on_gpu else 4  # sets of weights in turn, 386 MB each in bf16
    calls = [_layer(bench, shape, form, rows) for _ in range(layers)]
    times = seconds_per_call(calls, bench.device, bench.scale.repeats, graph=True)
    return [1e6 * seconds for seconds in times]


def _layer(bench: Bench, shape: Shape, form: str, rows: int) -> Callable[[], list[Tensor]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = (
        (queries + 2 * keys, shape.hidden),
        (shape.hidden, queries),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    )
    weights = [torch.randn(size, device=bench.device).to(torch.bfloat16) for size in sizes]
    methods = [_method(bench, shape, form, weight) for weight in weights]
    inputs = [torch.randn(rows, columns, device=bench.device).to(torch.bfloat16) for _, columns in sizes]
    return lambda: [method.apply(x, None) for method, x in zip(methods, inputs, strict=True)]


def _method(bench: Bench, shape: Shape, form: str, weight: Tensor) -> LinearMethod:
    """Return what the engine multiplies with by such a weight on this device. Raises `NotHere`."""
    if form == "bf16":
        return PlainLinear(weight)
    if form == "fp8" and not bench.on_gpu:
        raise NotHere("needs a CUDA device")
    kind, kernels = METHODS[form], select_kernels(shape.head_dim, torch.bfloat16, bench.device)
    scale = kind.scale_of(weight.float().abs().amax(dim=1))
    eight = kind.quantised(weight, scale)
    if form == "int8":
        return kernels.int8_linear(eight, scale) or kind.of(eight, scale)
    method = Fp8Linear.of(eight, scale)
    method.quantise_rows = kernels.quantise_rows
    return method
