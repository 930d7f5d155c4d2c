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
from parallel.methods import PACKING_ROWS, LinearMethod, PackedLinear, PlainLinear

logger = logging.getLogger(__name__)

PROBES = 4  # rows that are compared bit for bit, at least
# Sums that are compared: bfloat16 rounds nearly every difference in order away, so few would show none.
PROBED_SUMS = 1 << 16
# Numbers of rows that may be multiplied at once where not all round alike; multiples of AMX's 16 rows a tile.
ROW_COUNTS = (16, 32, 64, 128, 256)
# Numbers of rows that are tried to learn whether all round alike: around a tile's and a block's, and in between.
TRIED_COUNTS = (2, 3, 7, 15, 16, 17, 33, 64, 100)
# Elements of a weight from which fewer are tried: one row holds more sums, and a try of an output head took 5 s.
WIDE_WEIGHT = 1 << 23
TRIED_COUNTS_WIDE = (2, 7, 16, 17, 33)

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
    """Packs weights for oneDNN; looks once per shape which rows round otherwise in other company."""

    def __init__(self) -> None:
        self._pairs: dict[Shape, bool] = {}
        self._row_counts: dict[Shape, tuple[int, ...]] = {}

    def pack(self, weight: Tensor) -> PackedLinear | None:
        """Return the method, None where oneDNN cannot multiply by `weight`."""
        if not PackedLinear.supports(weight):
            return None
        packed = PackedLinear(weight)
        shape = (weight.shape[0], weight.shape[1], weight.dtype)
        if shape not in self._pairs:
            # fp32 is looked at for single rows alone: more was found on no CPU, and it would cost time at the start.
            self._row_counts[shape] = () if weight.dtype is torch.float32 else row_counts(packed, weight)
            self._pairs[shape] = not self._row_counts[shape] and single_row_differs(packed, weight)
        packed.pairs_single_row, packed.row_counts = self._pairs[shape], self._row_counts[shape]
        return packed


@torch.inference_mode()
def row_counts(
    packed: PackedLinear, weight: Tensor, pack: Callable[[Tensor], PackedLinear] = PackedLinear
) -> tuple[int, ...]:
    """Return how many rows `packed`, made of `weight`, may multiply at once for a row to keep its bits. () is any.

    The answer is one of shape and dtype: in place of a weight that is not wide another is tried, made by `pack`.
    Seen on a Xeon with AMX (oneDNN of torch 2.13): bfloat16 rows of 768 and 2,048 round by how many there are.
    """
    wide = weight.numel() >= WIDE_WEIGHT  # with so many sums some differ whatever is rounded away
    tried = TRIED_COUNTS_WIDE if wide else TRIED_COUNTS
    made = _random_rows if wide else _rows_that_sum_to_nothing
    if not wide:
        packed = pack(_rows_that_sum_to_nothing(weight.shape[0], weight.shape[1], weight.dtype, -1.0))
    x = made(2 * tried[-1], weight.shape[1], weight.dtype)
    among = packed.apply(x, None)
    if all(_same_bits(packed, x, among, count) for count in tried):
        return ()
    x = made(ROW_COUNTS[-1], weight.shape[1], weight.dtype)
    # One size that is the same at every place is enough; the others only spare work where they agree with it.
    for chosen in (PACKING_ROWS, *ROW_COUNTS):
        alike = torch.cat([packed.apply(rows, None) for rows in x.split(chosen)])
        if _same_bits(packed, x, alike, chosen):
            return tuple(count for count in ROW_COUNTS if count == chosen or _same_bits(packed, x, alike, count))
    return (1,)


def _random_rows(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, width, dtype=dtype)


def _rows_that_sum_to_nothing(rows: int, width: int, dtype: torch.dtype, sign: float = 1.0) -> Tensor:
    """Return rows, [rows, width], each value of which is there twice, the second time times `sign`.

    A product of such rows, with `sign` 1, by such a weight, with -1, is 0 but for what rounding leaves of it: two
    orders of the sum leave other bits, of which bfloat16 keeps the leading ones. Of a product that is not near 0 it
    rounds them away, in all but a few sums of thousands.
    """
    half = torch.randn(rows, width // 2, dtype=dtype)
    whole = torch.cat((half, half * sign, torch.zeros(rows, width % 2, dtype=dtype)), dim=1)
    # By the same order in rows and weights the two of a pair stand apart: side by side they would cancel at once.
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    return whole[:, order]


def _same_bits(packed: PackedLinear, x: Tensor, expected: Tensor, count: int) -> bool:
    """Whether `count` rows of `x` at once give what is expected of each, wherever among them it is."""
    shifts = (1,) if x.shape[1] * expected.shape[1] >= WIDE_WEIGHT else (0, 1, len(x) // 3)
    return all(
        torch.equal(packed.apply(x.roll(shift, 0)[:count], None), expected.roll(shift, 0)[:count]) for shift in shifts
    )


@torch.inference_mode()
def single_row_differs(packed: PackedLinear, weight: Tensor) -> bool:
    """Return whether `packed`, made of `weight`, rounds a single row otherwise than the same row among several."""
    probes = max(PROBES, -(-PROBED_SUMS // weight.shape[0]))
    x = torch.randn(probes, weight.shape[1], dtype=weight.dtype)
    among = packed.apply(x, None)
    return any(not torch.equal(packed.apply(x[row : row + 1], None)[0], among[row]) for row in range(probes))


def _is_open(layer: ParallelLinear) -> bool:
    return isinstance(layer.method, PlainLinear) and layer.weight.device.type == "cpu"
