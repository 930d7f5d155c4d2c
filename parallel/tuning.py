"""Chooses how each linear layer multiplies, once the weights are in."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from parallel.fp8 import Fp8Linear, QuantiseRows
from parallel.int8 import Int8Linear, TorchInt8Linear
from parallel.linear import ParallelLinear
from parallel.methods import LinearMethod, PackedLinear, PlainLinear

logger = logging.getLogger(__name__)

PROBES = 4  # rows that are compared bit for bit, at least
# Sums that are compared: bfloat16 rounds nearly every difference in order away, so few would show none.
PROBED_SUMS = 1 << 16

Shape = tuple[int, int, torch.dtype]  # out, in, dtype
Pack = Callable[[Tensor], LinearMethod | None]
PackInt8 = Callable[[Tensor, Tensor], LinearMethod | None]  # weight [out, in] in int8, scale [out]


def choose_methods(module: nn.Module, native: Pack | None = None) -> None:
    """Pack the weight of each plain linear layer in `module` for this CPU, and free weights nobody reads.

    Call once, after the weights are loaded and torch's thread count is set. Layers on other devices and layers that
    were given another method already are left alone.

    native: tried first; what it returns None for is packed for oneDNN where that is possible.

    The rule needs no measurement: packed was ahead on all CPUs tried, from level to 2.5 times as fast, but for a
    tenth lost at one row on one of them. A measurement errs by more on a busy machine, and replicas that chose
    differently would round differently.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, ParallelLinear) and _is_open(layer)]
    owners = Counter(id(weight) for part in module.modules() for weight in part._parameters.values())
    one_dnn = OneDNN()
    for layer in layers:
        weight = layer.weight
        method = (native and native(weight)) or one_dnn.pack(weight)
        if method is None:
            continue
        layer.method = method
        # An embedding tied to an output head still looks its rows up in the plain weight.
        if owners[id(weight)] == 1:
            layer.release_weight()
    linear = [layer for layer in module.modules() if isinstance(layer, ParallelLinear)]
    if linear:
        methods = Counter(type(layer.method).__name__ for layer in linear)
        logger.info("products: %s", ", ".join(f"{count} by {name}" for name, count in sorted(methods.items())))


def choose_quantised(module: nn.Module, int8: PackInt8, quantise_rows: QuantiseRows) -> None:
    """Let the quantised linear layers in `module` multiply by these kernels, and free weights nobody reads.

    Call once, after the weights are loaded. What `int8` returns None for is multiplied by torch.
    """
    for layer in module.modules():
        method = layer.method if isinstance(layer, ParallelLinear) else None
        if isinstance(layer, ParallelLinear) and isinstance(method, Int8Linear):
            weight, scale = layer.weight, layer.weight_scale
            layer.method = int8(weight, scale) or _torch_int8(weight, scale) or method
            if layer.method is not method and weight.device.type == "cpu":
                layer.release_weight()
        elif isinstance(method, Fp8Linear):
            method.quantise_rows = quantise_rows


def _torch_int8(weight: Tensor, scale: Tensor) -> LinearMethod | None:
    return TorchInt8Linear(weight, scale) if TorchInt8Linear.supports(weight) else None


class OneDNN:
    """Packs weights for oneDNN; looks once per shape whether its single rows round otherwise."""

    def __init__(self) -> None:
        self._differs: dict[Shape, bool] = {}

    def pack(self, weight: Tensor) -> PackedLinear | None:
        """Return the method, None where oneDNN cannot multiply by `weight`."""
        if not PackedLinear.supports(weight):
            return None
        packed = PackedLinear(weight)
        shape = (weight.shape[0], weight.shape[1], weight.dtype)
        if shape not in self._differs:
            self._differs[shape] = single_row_differs(packed, weight)
        packed.pairs_single_row = self._differs[shape]
        return packed


@torch.inference_mode()
def single_row_differs(packed: PackedLinear, weight: Tensor) -> bool:
    """Return whether `packed`, made of `weight`, rounds a single row otherwise than the same row among several."""
    probes = max(PROBES, -(-PROBED_SUMS // weight.shape[0]))
    x = torch.randn(probes, weight.shape[1], dtype=weight.dtype)
    among = packed.apply(x, None)
    return any(not torch.equal(packed.apply(x[row : row + 1], None)[0], among[row]) for row in range(probes))


def _is_open(layer: ParallelLinear) -> bool:
    return isinstance(layer.method, PlainLinear) and layer.weight.device.type == "cpu"
