"""How linear layers multiply: packed equals plain, and the choice keeps memory and correctness."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.group import SoloGroup
from parallel.linear import ColumnParallelLinear
from parallel.methods import ByRowCount, LinearMethod, PackedLinear, PlainLinear
from parallel.tuning import LinearTimings, choose_methods, measure, single_row_differs

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
        parameter.data.normal_()
    return made


def timings(seconds: dict[int, tuple[float, float]], dtype: torch.dtype = torch.float32) -> LinearTimings:
    return LinearTimings({(OUT, IN, dtype, torch.get_num_threads()): seconds})


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
    module.weight.data.normal_()
    if not PackedLinear.supports(module.weight):
        pytest.skip(f"oneDNN does not multiply {dtype} on this machine")
    shape = (192, width, dtype, torch.get_num_threads())
    choose_methods(module, timings=LinearTimings({shape: {1: (2.0, 1.0)}}))
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


def test_other_devices_and_dtypes_are_not_packed():
    assert not PackedLinear.supports(torch.empty(1, 1, device="meta"))
    assert not PackedLinear.supports(torch.empty(1, 1, dtype=torch.float64))


def test_the_method_is_chosen_by_row_count():
    method = ByRowCount([4, 16], [Named(1.0), Named(2.0), Named(3.0)])
    found = [method.apply(torch.empty(rows, 2), None).item() for rows in (0, 1, 4, 5, 16, 17, 999)]
    assert found == [1, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="2 limits need 3 methods, not 1"):
        ByRowCount([1, 2], [Named(1.0)])


@needs_packing
def test_packed_everywhere_frees_the_plain_weight_and_changes_nothing():
    module, x = layer(), torch.randn(5, IN)
    expected = module(x)
    choose_methods(module, timings=timings({1: (2.0, 1.0), 64: (2.0, 1.9)}))
    assert isinstance(module.method, PackedLinear)
    assert module.weight.numel() == 0
    torch.testing.assert_close(module(x), expected)


@needs_packing
def test_plain_where_it_is_clearly_better_everywhere():
    module = layer()
    choose_methods(module, timings=timings({1: (1.0, 2.0), 64: (1.0, 2.0)}))
    assert isinstance(module.method, PlainLinear)
    assert module.weight.shape == (OUT, IN)


@needs_packing
def test_a_difference_within_the_noise_does_not_decide():
    module = layer()
    choose_methods(module, timings=timings({1: (1.0, 1.4), 64: (1.0, 1.4)}))
    assert isinstance(module.method, PackedLinear)


@needs_packing
def test_both_are_kept_where_each_is_better_somewhere_and_there_is_room():
    module, x = layer(), torch.randn(100, IN)
    expected = module(x)
    choose_methods(module, timings=timings({1: (1.0, 2.0), 64: (2.0, 1.0)}), extra_bytes=OUT * IN * 4)
    assert isinstance(module.method, ByRowCount)
    assert module.weight.shape == (OUT, IN)
    for rows in (1, 7, 8, 9, 100):
        torch.testing.assert_close(module(x[:rows]), expected[:rows])


@needs_packing
@pytest.mark.parametrize(("at_64", "kept"), [((2.0, 0.1), PackedLinear), ((2.0, 1.9), PlainLinear)])
def test_without_room_for_both_the_better_one_overall_is_kept(at_64, kept):
    module = layer()
    choose_methods(module, timings=timings({1: (1.0, 3.0), 64: at_64}))
    assert isinstance(module.method, kept)


@needs_packing
def test_packed_is_taken_where_the_machine_was_too_busy_to_measure():
    module = layer()
    choose_methods(module, timings=timings({}))
    assert isinstance(module.method, PackedLinear)


@needs_packing
def test_a_head_tied_to_an_embedding_leaves_it_its_rows():
    embedding = VocabParallelEmbedding(OUT, IN, GROUP, torch.float32)
    head = ParallelLMHead(IN, OUT, False, GROUP, torch.float32)
    head.tie_to(embedding)
    embedding.weight.data.normal_()
    x, rows = torch.randn(3, IN), embedding.weight.clone()
    expected = head(x)
    choose_methods(nn.ModuleList([embedding, head]), timings=timings({1: (2.0, 1.0)}))
    assert isinstance(head.method, PackedLinear)
    assert torch.equal(embedding(torch.arange(OUT)), rows)
    torch.testing.assert_close(head(x), expected)


@needs_packing
def test_each_shape_is_measured_once_and_a_foreign_method_is_left_alone():
    module = nn.ModuleList([layer(), layer(), layer()])
    quantised = Named(1.0)
    module[2].method = quantised
    found = choose_methods(module)
    assert list(found.seconds) == [(OUT, IN, torch.float32, torch.get_num_threads())]
    assert module[2].method is quantised
    known = dict(found.seconds)
    assert choose_methods(nn.ModuleList([layer()]), timings=found).seconds == known


@needs_packing
def test_measuring_keeps_to_its_budget_and_finds_real_times():
    weight = torch.randn(256, 256)
    found = measure(weight, PackedLinear(weight), (1, 8), 10.0)
    assert all(plain > 0 and packed > 0 for plain, packed in found.values())
    assert set(measure(weight, PackedLinear(weight), (1, 8, 64), 0.0)) <= {1}
