"""How linear layers multiply: packed equals plain, and the choice keeps memory and correctness."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.base import TorchKernels
from engine.kernels.onednn import WIDE_WEIGHT, PackedLinear, row_counts, single_row_differs
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.quantization.select import choose_products
from parallel.group import SoloGroup
from parallel.linear import ColumnParallelLinear, LinearMethod

IN, OUT = 24, 40
GROUP = SoloGroup()

needs_packing = pytest.mark.skipif(
    not PackedLinear.supports(torch.empty(1, 1)), reason="this build of torch has no oneDNN"
)


class Named(LinearMethod):
    def __init__(self, name: float) -> None:
        self.name = name

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.tensor(self.name)


def layer(dtype: torch.dtype = torch.float32) -> ColumnParallelLinear:
    made = ColumnParallelLinear(IN, OUT, True, GROUP, dtype)
    for parameter in made.parameters():
        parameter.allocate()
        parameter.data.normal_()
    return made


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 3, 64, 130])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_equals_plain(dtype: torch.dtype, rows: int, with_bias: bool):
    weight = torch.randn(OUT, IN, dtype=dtype)
    if not PackedLinear.supports(weight):
        pytest.skip(f"oneDNN does not multiply {dtype} on this machine")
    x, bias = torch.randn(rows, IN, dtype=dtype), torch.randn(OUT, dtype=dtype) if with_bias else None
    with torch.inference_mode():
        found, expected = PackedLinear(weight).apply(x, bias), F.linear(x, weight, bias)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 768, 2048])
def test_a_packed_layer_gives_a_row_the_same_bits_in_any_company(dtype: torch.dtype, width: int):
    module = ColumnParallelLinear(width, 192, False, GROUP, dtype)
    module.weight.allocate()
    module.weight.data.normal_()
    if not PackedLinear.supports(module.weight):
        pytest.skip(f"oneDNN does not multiply {dtype} on this machine")
    choose_products(module, TorchKernels())
    x = torch.randn(300, width, dtype=dtype)
    with torch.inference_mode():
        together = module(x)
        for rows in (1, 2, 3, 7, 16, 33, 64, 100):
            for start in (0, 1, 200 - rows):
                assert torch.equal(module(x[start : start + rows]), together[start : start + rows]), (rows, start)


@needs_packing
def test_a_single_row_is_paired_only_where_it_would_differ():
    weight = torch.randn(192, 2048)
    packed = PackedLinear(weight)
    packed.pairs_single_row = single_row_differs(packed, weight)
    assert not single_row_differs(packed, weight)
    x = torch.randn(1, 2048)
    assert packed.apply(x, torch.ones(192)).shape == (1, 192)


class RoundsByCompany(PackedLinear):
    """Stands for a CPU whose products depend on how many rows there are, and on where among them a row is."""

    def __init__(self, weight: torch.Tensor, differs: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(weight)
        # Each row for itself in fp64, and rounded, where the order of the sums decides nothing.
        self._multiply = lambda x, *_: (
            (x.double() @ weight.double().T).round(decimals=6) + differs(len(x), torch.arange(len(x)))[:, None]
        ).to(x.dtype)


@needs_packing
@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        (lambda count, places: 0 * places, ()),
        (lambda count, places: 0 * places + (0 if count % 32 == 0 else count), (32, 64, 128, 256)),
        (lambda count, places: 0 * places + (0 if count > 64 else count), (64,)),
        (lambda count, places: 0 * places + (0 if count == 16 else places), (16,)),
        (lambda count, places: 1 + places, (1,)),
    ],
    ids=["none", "but for whole blocks", "by sizes", "by places", "by every place"],
)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_rows_that_round_by_how_many_there_are_go_by_fixed_numbers(monkeypatch, wide, differs, expected):
    weight = torch.randn(48, 64)
    monkeypatch.setattr("engine.kernels.onednn.WIDE_WEIGHT", weight.numel() + 1 - wide)
    packed = RoundsByCompany(weight, differs)
    packed.row_counts = row_counts(packed, weight, lambda other: RoundsByCompany(other, differs))
    assert packed.row_counts == expected
    x = torch.randn(300, 64)
    together = packed.apply(x, None)
    assert together.shape == (300, 48)
    for rows in (1, 2, 3, 15, 16, 17, 64, 65, 256, 299):
        for start in (0, 1, 300 - rows):
            assert torch.equal(packed.apply(x[start : start + rows], None), together[start : start + rows])
    assert packed.apply(x[:0], None).shape == (0, 48)


class SumsByCompany(PackedLinear):
    """Stands for a CPU that sums from the other end where there are more than 16 rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.float())  # a CPU with AVX2 alone packs no bfloat16; what is packed is not used
        parts = weight.float().split(8, dim=1)

        def multiply(x, *_):
            products = [rows @ part.T for rows, part in zip(x.float().split(8, dim=1), parts, strict=True)]
            total = torch.zeros_like(products[0])
            for product in products if len(x) <= 16 else reversed(products):
                total += product
            return total.to(x.dtype)

        self._multiply = multiply


@needs_packing
def test_another_order_of_sums_is_seen_each_time_although_bfloat16_rounds_most_of_it_away():
    found = set()
    for seed in range(20):
        torch.manual_seed(seed)
        weight = torch.randn(2, 256, dtype=torch.bfloat16)
        found.add(row_counts(SumsByCompany(weight), weight, SumsByCompany))
    assert found == {(32, 64, 128, 256)}


@needs_packing
def test_an_output_head_is_tried_with_few_rows():
    class Counting(PackedLinear):
        rows = 0

        def apply(self, x, bias):
            self.rows += len(x)
            return super().apply(x, bias)

    weight = torch.randn(WIDE_WEIGHT // 64, 64)
    packed = Counting(weight)
    row_counts(packed, weight)
    assert packed.rows <= 160


def test_other_devices_and_dtypes_are_not_packed():
    assert not PackedLinear.supports(torch.empty(1, 1, device="meta"))
    assert not PackedLinear.supports(torch.empty(1, 1, dtype=torch.float64))


@needs_packing
def test_packing_frees_the_plain_weight_and_changes_nothing():
    module, x = layer(), torch.randn(5, IN)
    expected = module(x)
    choose_products(module, TorchKernels())
    assert isinstance(module.method, PackedLinear)
    assert module.weight.numel() == 0
    torch.testing.assert_close(module(x), expected)


@needs_packing
def test_a_head_tied_to_an_embedding_leaves_it_its_rows():
    embedding = VocabParallelEmbedding(OUT, IN, GROUP, torch.float32)
    head = ParallelLMHead(IN, OUT, False, GROUP, torch.float32)
    head.tie_to(embedding)
    embedding.weight.allocate()
    embedding.weight.data.normal_()
    x, rows = torch.randn(3, IN), embedding.weight[:OUT].clone()
    expected = head(x)
    choose_products(nn.ModuleList([embedding, head]), TorchKernels())
    assert isinstance(head.method, PackedLinear)
    assert torch.equal(embedding(torch.arange(OUT)), rows)
    torch.testing.assert_close(head(x), expected)


@needs_packing
def test_a_foreign_method_is_left_alone():
    module = nn.ModuleList([layer(), layer()])
    quantised = Named(1.0)
    module[1].method = quantised
    choose_products(module, TorchKernels())
    assert isinstance(module[0].method, PackedLinear)
    assert module[1].method is quantised


@needs_packing
def test_a_method_chosen_once_is_kept():
    module = layer()
    choose_products(module, TorchKernels())
    chosen = module.method
    choose_products(module, TorchKernels())
    assert module.method is chosen


@needs_packing
def test_a_method_of_the_callers_comes_before_onednn():
    module = nn.ModuleList([layer(), layer()])
    own = Named(1.0)

    class OfOne(TorchKernels):
        def linear(self, weight: torch.Tensor) -> LinearMethod | None:
            return own if weight is module[0].weight else None

    choose_products(module, OfOne())
    assert module[0].method is own
    assert isinstance(module[1].method, PackedLinear)
