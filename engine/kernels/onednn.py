"""Products with weights in oneDNN's layout, and on which numbers of rows a row's bits depend there."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from parallel.linear import LinearMethod

# Row count that oneDNN's layout is chosen for. A layout for one row is slow for many; one for 64 is good for any.
PACKING_ROWS = 64
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


class PackedLinear(LinearMethod):
    """The weight reordered once into oneDNN's blocked layout (CPU); it does not keep the weight it was made from.

    For shapes where it is faster than the engine's compiled products, and where there is no compiler.

    A row's bits must not depend on its company. oneDNN sums each row in the same order however many rows there are,
    but for two cases, which `OneDNN` finds by trying: a single row of a wide input, multiplied
    as two with `pairs_single_row` set; and bfloat16 on CPUs with AMX, where only the numbers of rows in `row_counts`
    (ascending) are multiplied at once: what is left over is filled up to the next of them with zeros.

    oneDNN builds a kernel for each row count it meets, about half a millisecond per layer shape: callers that can
    choose should use few row counts.
    """

    def __init__(self, weight: Tensor) -> None:
        self.pairs_single_row = False
        self.row_counts: tuple[int, ...] = ()  # any number where empty
        self._shape = tuple(weight.shape)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKING_ROWS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether this machine's oneDNN can pack `weight`."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype is torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return weight.dtype is torch.float32

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.row_counts:
            return self._in_counts(x, bias)
        if self.pairs_single_row and x.shape[0] == 1:
            return self._product(x.repeat(2, 1), bias)[:1]
        return self._product(x, bias)

    @override
    def describe(self) -> str:
        return "PackedLinear {}x{}".format(*self._shape)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(x, self._packed, bias, "none", [], "")

    def _in_counts(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply as many rows at once as `row_counts` allow."""
        most = self.row_counts[-1]
        pieces = []
        for rows in x.split(most):
            count = next(count for count in self.row_counts if count >= len(rows))
            filled = rows if len(rows) == count else F.pad(rows, (0, 0, 0, count - len(rows)))
            pieces.append(self._product(filled, bias)[: len(rows)])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


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
