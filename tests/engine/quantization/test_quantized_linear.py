"""Quantised linear layers against exact arithmetic: how far a weight may move, and what a product is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels import compiler
from engine.kernels.base import LARGEST_E4M3, FourBits, TorchKernels, quantise_rows
from engine.kernels.native_linear import NativeInt8Linear, NativeLinear, product_library
from engine.kernels.onednn import PackedLinear
from engine.quantization.fp8 import Fp8Linear
from engine.quantization.int8 import Int8Linear, TorchInt8Linear
from engine.quantization.layout import dequantised
from engine.quantization.made_int4 import quantised_int4
from engine.quantization.select import choose_products
from engine.quantization.spec import QuantizationSpec
from parallel.group import SoloGroup
from parallel.linear import ColumnParallelLinear, LinearMethod, MergedColumnParallelLinear, PlainLinear
from parallel.parameter import ShardedParameter, TensorSource

FP8, INT8 = Fp8Linear, Int8Linear
GROUP = SoloGroup()
DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 40)
ULP = 2.0**-23  # of float32


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Of magnitudes from denormal to huge in one matrix, zeros and rows of zeros among them."""
    rows, columns, seed = draw(st.integers(1, 6)), draw(st.integers(1, 40)), draw(st.integers(0, 999))
    made = normal(rows, columns, seed=seed) * 10.0 ** draw(st.integers(-20, 20))
    made[torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.2] = 0
    made[draw(st.integers(0, rows - 1))] *= draw(st.sampled_from([0.0, 1.0, 1e-5]))
    return made.to(draw(st.sampled_from(DTYPES)))


def in_parts(weight: Tensor, form) -> tuple[Tensor, Tensor, Tensor]:
    """Return quantised weights, scales, and what they stand for in float64."""
    scale = form.scale_of(weight.float().abs().amax(dim=1))
    found = form.quantised(weight, scale)
    return found, scale, found.double() * scale.double()[:, None]


@given(weights())
def test_int8_moves_a_weight_by_half_a_step_at_most(weight: Tensor) -> None:
    found, scale, stands_for = in_parts(weight, INT8)
    assert int(found.to(torch.int32).abs().max()) <= 127
    # Half a step, and what the quotient's own rounding adds to it at most.
    limit = scale.double()[:, None] * (0.5 + 127 * 2 * ULP)
    assert bool(((stands_for - weight.double()).abs() <= limit).all())


@given(weights())
def test_fp8_moves_a_weight_by_a_sixteenth_of_itself_or_half_the_least_step(weight: Tensor) -> None:
    _, scale, stands_for = in_parts(weight, FP8)
    # e4m3: 3 bits of mantissa; below 2^-6 steps of 2^-9.
    limit = weight.double().abs() * (2**-4 + 4 * ULP) + scale.double()[:, None] * 2**-10
    assert bool(((stands_for - weight.double()).abs() <= limit).all())


@pytest.mark.parametrize("form", [FP8, INT8])
def test_the_largest_weight_of_a_channel_is_kept_and_zeros_stay_zeros(form) -> None:
    weight = normal(9, 33)
    weight[3] = 0
    found, _, stands_for = in_parts(weight, form)
    assert bool((found.float().abs().amax(dim=1)[weight.any(dim=1)] == form.limit).all())
    torch.testing.assert_close(stands_for.abs().amax(dim=1), weight.abs().amax(dim=1).double(), rtol=1e-6, atol=0)
    assert not stands_for[3].any()


@given(weights())
def test_rows_of_activations_are_quantised_alone_and_hold_their_largest(x: Tensor) -> None:
    rows, scales = quantise_rows(x)
    stands_for = rows.double() * scales.double()
    limit = x.double().abs() * (2**-4 + 4 * ULP) + scales.double() * 2**-10
    assert bool(((stands_for - x.double()).abs() <= limit).all())
    for i in range(len(x)):
        alone, its_scale = quantise_rows(x[i : i + 1])
        assert torch.equal(alone.float()[0], rows.float()[i])
        assert torch.equal(its_scale[0], scales[i])


def test_scales_are_quotients_on_a_gpu_too() -> None:
    """By a number of the host torch's operations on CUDA multiply by its reciprocal instead, rounded."""
    divisors = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "div" in str(function):
                divisors.append(args[1])
            return function(*args, **(kwargs or {}))

    with Watch():
        quantise_rows(normal(3, 8))
    assert len(divisors) == 2
    assert all(isinstance(each, Tensor) and each.dim() for each in divisors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_fp8_is_the_product_of_what_the_rows_and_weights_stand_for(dtype: torch.dtype, with_bias: bool) -> None:
    x, weight = normal(7, 48, dtype=dtype), normal(32, 48, seed=1)
    bias = normal(32, seed=2, dtype=dtype) if with_bias else None
    stored, scale, stands_for = in_parts(weight, FP8)
    found = Fp8Linear.of(stored, scale).apply(x, bias)
    rows, scales = quantise_rows(x)
    exact = (rows.double() * scales.double()) @ stands_for.t() + (0 if bias is None else bias.double())
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), exact, rtol=2**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)
    # Against the plain product: each factor is off by a sixteenth at most, and the parts below the least step.
    steps = (scales.double() * x.shape[1] ** 0.5) * weight.abs().max()
    limit = (2**-4 + 2**-4 + 2**-8 + 2**-7) * (x.double().abs() @ weight.double().abs().t()) + steps * 2**-8
    plain = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert bool(((found.double() - plain).abs() <= limit).all())


def test_fp8_of_no_rows_has_no_rows() -> None:
    stored, scale, _ = in_parts(normal(32, 48), FP8)
    assert Fp8Linear.of(stored, scale).apply(torch.empty(0, 48), None).shape == (0, 32)


def native(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> NativeInt8Linear:
    library = product_library(dtype)
    if library is None or not NativeInt8Linear.supports(library, weight):
        pytest.skip("no C compiler on this machine")
    return NativeInt8Linear(library, weight, scale, dtype, 1)


def from_torch(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> TorchInt8Linear:
    if not TorchInt8Linear.supports(weight):
        pytest.skip("torch has no int8 product for this size on this CPU")
    return TorchInt8Linear(weight, scale)


METHODS = {
    "native": native,
    "torch": from_torch,
    "portable": lambda weight, scale, dtype: Int8Linear.of(weight, scale),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (192, 320), (70, 34), (1, 2)])
@pytest.mark.parametrize("name", METHODS)
def test_int8_is_the_product_with_what_the_weights_stand_for(name: str, shape, dtype: torch.dtype) -> None:
    weight, scale = whole(*shape), normal(shape[0], seed=3).abs() + 0.1
    method = METHODS[name](weight, scale, dtype)
    bias = normal(shape[0], seed=2, dtype=dtype)
    for rows in ROWS:
        x = normal(rows, shape[1], dtype=dtype)
        exact = x.double() @ (weight.double() * scale.double()[:, None]).t() + bias.double()
        found = method.apply(x, bias)
        assert found.dtype is dtype
        size = float(exact.abs().max())
        assert float((found.double() - exact).abs().max()) <= size * (2**-6 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(192, 320), (70, 34)])
@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_row_has_the_same_bits_in_any_company(name: str, shape, dtype: torch.dtype) -> None:
    if name == "torch" and shape[0] % 64:
        return
    method = METHODS[name](whole(*shape), normal(shape[0], seed=3).abs(), dtype)
    x, bias = normal(300, shape[1], dtype=dtype), normal(shape[0], seed=2, dtype=dtype)
    together = method.apply(x, bias)
    for rows in (*ROWS, 256, 257):
        for start in (0, 300 - rows):
            assert torch.equal(method.apply(x[start : start + rows], bias), together[start : start + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", compiler.isas() or [compiler.NATIVE])
@pytest.mark.parametrize("width", [4100, 2080])  # more than a strip of the wide ones holds; some have no whole tiles
def test_the_sums_are_bit_for_bit_those_of_the_plain_product_with_whole_numbers(
    dtype, isa, width, monkeypatch
) -> None:
    monkeypatch.setenv(compiler.ISA_VARIABLE, isa)
    weight = whole(130, width)
    weight[0, :2] = torch.tensor([-128, 127])
    found, plain = (
        native(weight, torch.ones(130), dtype),
        NativeLinear(product_library(dtype), weight.to(dtype), 1),
    )
    for rows in ROWS:
        x = normal(rows, width, dtype=dtype)
        assert torch.equal(found.apply(x, None), plain.apply(x, None))


def test_c_reads_no_row_of_another_shape_or_layout() -> None:
    method = native(whole(64, 32), torch.ones(64), torch.float32)
    for x in (torch.ones(2, 31), torch.ones(2, 32).double(), torch.ones(32, 2).t()):
        with pytest.raises(ValueError, match="adjacent features"):
            method.apply(x, None)


def give(layer, form, stored: bool) -> None:
    """Let `layer` hold its weight in a form, as a checkpoint has it or made of the plain one."""
    layer.method = form(QuantizationSpec("made", "made", stored=stored))
    layer.method.create(layer, "layer")
    layer.method.load(layer)


def merged() -> MergedColumnParallelLinear:
    layer = MergedColumnParallelLinear(48, [32, 16], True, GROUP, torch.float32)
    for part, rows in enumerate((32, 16)):
        layer.weight.load(TensorSource(normal(rows, 48, seed=part)), part)
        layer.bias.load(TensorSource(normal(rows, seed=9)), part)
    return layer


@pytest.mark.parametrize("form", [FP8, INT8])
def test_a_layer_is_quantised_in_place_and_its_plain_weight_is_gone(form) -> None:
    layer = merged()
    plain = layer.weight
    give(layer, form, stored=False)
    assert layer.weight is not plain
    assert [p.dtype for p in (layer.weight, layer.weight_scale)] == [form.dtype, torch.float32]
    assert sum(p.nbytes for p in layer.parameters()) == 48 * 48 + 48 * 4 + 48 * 4
    assert (layer.weight.loaded, layer.weight_scale.loaded) == (True, True)
    assert type(layer.method) is form
    x = normal(5, 48, seed=4)
    expected = x @ plain.t() + layer.bias
    assert float((layer(x) - expected).norm() / expected.norm()) < (0.05 if form is FP8 else 0.01)


@pytest.mark.parametrize("form", [FP8, INT8])
def test_a_stored_layer_loads_parts_with_their_own_scales(form) -> None:
    layer, made = merged(), merged()
    give(made, form, stored=False)
    give(layer, form, stored=True)
    assert layer.weight.missing == layer.weight_scale.missing == (0, 1)
    for part, rows in ((0, slice(0, 32)), (1, slice(32, 48))):
        layer.weight.load(TensorSource(made.weight.data[rows]), part)
        layer.weight_scale.load(TensorSource(made.weight_scale.data[rows]), part)
    x = normal(5, 48, seed=4)
    assert torch.equal(layer(x), made(x))


def test_a_vacant_parameter_has_its_shape_and_no_memory_until_it_is_loaded() -> None:
    parameter = ShardedParameter.of((30, 20), torch.float32, torch.device("cpu"))
    assert (tuple(parameter.shape), parameter.untyped_storage().nbytes()) == ((30, 20), 4)
    parameter.load(TensorSource(normal(30, 20)))
    assert torch.equal(parameter.data, normal(30, 20))
    assert parameter.data.is_contiguous()


def test_kernels_are_put_in_the_place_of_portable_products() -> None:
    module = torch.nn.ModuleList(ColumnParallelLinear(64, 64, False, GROUP, torch.float32) for _ in range(4))
    for layer in module:
        layer.weight.load(TensorSource(normal(64, 64)))
    for layer, form in zip(module, (INT8, INT8, FP8), strict=False):
        give(layer, form, stored=False)
    own, x = PlainLinear(torch.zeros(1)), normal(3, 64)
    expected = TorchInt8Linear(module[1].weight, module[1].weight_scale).apply(x, None)
    first = module[0].weight

    class OfOne(TorchKernels):
        def int8_linear(self, weight: Tensor, scale: Tensor) -> LinearMethod | None:
            return own if weight is first else None

        def quantise_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return quantise_rows(x)

    kernels = OfOne()
    choose_products(module, kernels)
    assert module[0].method is own
    by_torch = TorchInt8Linear.supports(module[0].weight_scale.expand(64, 64))
    assert isinstance(module[1].method, TorchInt8Linear if by_torch else Int8Linear)
    assert torch.equal(module[1](x), expected)
    assert (module[0].weight.numel(), module[2].weight.numel()) == (0, 64 * 64)
    assert isinstance(module[2].method, Fp8Linear)
    assert module[2].method.quantise_rows == kernels.quantise_rows
    assert type(module[3].method) in (PackedLinear, PlainLinear)


def test_fp8_holds_what_it_says() -> None:
    assert torch.finfo(torch.float8_e4m3fn).max == LARGEST_E4M3 == FP8.limit


def test_small_weights_in_float16_keep_their_digits_and_nan_is_not_hidden() -> None:
    small = torch.tensor([[1.2e-5, -6e-6] * 8, [float("nan"), 0.1] * 8], dtype=torch.float16)
    for form in (Int8Linear, Fp8Linear):
        scale = form.scale_of(small.abs().amax(dim=1).float(), small.dtype)
        found = form.quantised(small, scale).float() * scale[:, None]
        assert torch.allclose(found[0], small[0].float(), rtol=0.07, atol=0)
        assert found[1].isnan().any()
    kept = small[:1].float()
    quantised_int4(kept, 16)
    assert torch.equal(kept, small[:1].float()), "the weight itself was changed"
    codes, scales = quantised_int4(small, 16)
    zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    found = dequantised(FourBits(codes, scales.float(), zeros), torch.float32)
    assert torch.allclose(found[0], small[0].float(), rtol=0.07, atol=0)
    assert found[1].isnan().any()
