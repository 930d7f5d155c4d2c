"""Triton's part of quantised products, through the interpreter: the bits of torch's rows, and exact sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels import triton_linear as triton_quantised
from engine.kernels.base import FourBits, quantise_rows
from engine.kernels.triton_kernels import TritonKernels
from engine.kernels.triton_linear import TritonInt8Linear, quantise_rows_in_one_pass
from engine.quantization.int8 import Int8Linear
from engine.quantization.layout import dequantised
from engine.quantization.widened import FewRowsLinear
from parallel.linear import PlainLinear
from tests.interpreter import exact_halves
from tests.triton_compiler import compiled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def rounding():
    with exact_halves():
        yield


def some(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 32), (1, 16), (3, 48), (5, 1024)], ids=str)
def test_rows_are_quantised_to_the_bits_of_torch(dtype, shape):
    x = some(*shape, dtype=dtype) * 10.0 ** torch.arange(-4, shape[0] - 4, device=DEVICE)[:, None].to(dtype)
    if shape[0] > 1:
        x[1] = 0
        x[0, 0] = 0
    found, scales = quantise_rows_in_one_pass(x)
    rows, expected = quantise_rows(x)
    assert (found.dtype, scales.shape) == (torch.float8_e4m3fn, (shape[0], 1))
    assert torch.equal(scales, expected)
    assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_stays_none(poison):
    x = some(3, 48)
    x[1, 7] = poison
    found, scales = quantise_rows_in_one_pass(x)
    assert (found.float() * scales)[1, 7].isnan()
    assert torch.isfinite(found.float() * scales)[[0, 2]].all()


def test_rows_of_a_wider_tensor_are_read_where_they_lie():
    wide = some(4, 96)
    found, scales = quantise_rows_in_one_pass(wide[:, 32:64])
    rows, expected = quantise_rows(wide[:, 32:64])
    assert torch.equal(found.float(), rows.float())
    assert torch.equal(scales, expected)


@pytest.mark.parametrize("shape", [(2, 40_000), (3, 8)], ids=str)
def test_what_the_kernel_is_not_made_for_is_quantised_by_torch(monkeypatch, shape):
    monkeypatch.setattr(triton_quantised, "_quantise_rows", None)
    x = some(*shape)
    x = x if shape[1] > 32768 else x.t()  # a column is no row
    assert torch.equal(quantise_rows_in_one_pass(x)[0].float(), quantise_rows(x)[0].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "ins"), [(16, 128), (33, 130), (5, 7)])
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_few_rows_with_int8_weights(dtype, rows, outs, ins):
    weight = torch.randint(-128, 128, (outs, ins), generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int8)
    scale, bias = some(outs, seed=2).abs(), some(outs, dtype=dtype, seed=3)
    x = some(rows, ins, dtype=dtype) / 128
    method = TritonInt8Linear(weight, scale)
    for offset in (bias, None):
        exact = x.double() @ (weight.double() * scale.double()[:, None]).t() + (
            0 if offset is None else offset.double()
        )
        found = method.apply(x, offset)
        assert found.dtype is dtype
        # Sums of products in fp32, rounded once.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), exact, rtol=eps, atol=1e-4 + eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "ins", "group"), [(16, 128, 32), (33, 144, 16), (5, 24, 24)])
@pytest.mark.parametrize("kind", ["int4", "int4 bfloat16", "int4 float16", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_few_rows_with_weights_of_four_bits(dtype, rows, outs, ins, group, kind):
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (outs, ins // 2), generator=generator).to(DEVICE, torch.uint8)
    scale = some(outs, ins // group, seed=2) / 16  # of either sign
    zero = whole = None
    if kind.startswith("int4"):
        scale = scale.to(getattr(torch, kind.removeprefix("int4").strip() or "float32"))
        zero = torch.randint(0, 17, scale.shape, generator=generator).to(DEVICE, torch.uint8)
    elif kind == "mxfp4":
        scale = torch.randint(118, 126, scale.shape, generator=generator).to(DEVICE, torch.uint8)
        scale[0] = 0  # the least there is, 2^-127
    elif kind == "nvfp4":
        scale, whole = (scale * 100).to(torch.float8_e4m3fn), some(outs, seed=4).abs() / 50
    weight = FourBits(codes, scale, zero, whole)
    wide, bias = some(rows, ins + 3, dtype=dtype), some(outs, dtype=dtype, seed=3)
    x = wide[:, :ins]
    method = TritonKernels().four_bit_linear(weight)
    if whole is None:
        check(method, x, bias, dequantised(weight, dtype).double())
    else:  # E2M1 times e4m3 is exact
        exact = dequantised(replace(weight, whole=torch.ones_like(whole)), dtype).double()
        check(method, x, bias, exact * whole[:, None])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "ins", "block"), [(16, 128, (16, 128)), (36, 144, (12, 16)), (5, 24, (1, 24))])
@pytest.mark.parametrize("held", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_few_rows_with_weights_in_eight_bits(dtype, rows, held, outs, ins, block):
    weight = (some(outs, ins, seed=1) * 40).to(held)
    scale = some(outs // block[0], ins // block[1], seed=2) / 64
    scale = scale.bfloat16() if held is torch.int8 else scale
    x, bias = some(rows, ins, dtype=dtype), some(outs, dtype=dtype, seed=3)
    method = TritonKernels().block_linear(weight, scale)
    plain = (weight.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)).to(dtype).double()
    check(method, x, bias, plain)


def check(method, x, bias, plain):
    """Sums of products with the plain weight in fp32, rounded once."""
    eps = torch.finfo(x.dtype).eps
    for offset in (bias, None):
        exact = x.double() @ plain.t() + (0 if offset is None else offset.double())
        found = method.apply(x, offset)
        assert found.dtype is x.dtype
        torch.testing.assert_close(found.double(), exact, rtol=eps, atol=1e-4 + eps)


def test_more_rows_make_the_weight_plain_first():
    few, many = PlainLinear(torch.zeros(3, 5)), PlainLinear(torch.ones(3, 5))
    method = FewRowsLinear(few, many)
    assert [float(method.apply(torch.ones(rows, 5), None).max()) for rows in (1, 64, 65)] == [0, 0, 5]


@pytest.mark.timeout(300)
def test_coded_products_compile_for_gpus_and_fit_them():
    launches = compiled("tests.engine.kernels.triton_coded_launches")
    assert {one["case"] for one in launches} == {
        "int4",
        "int4 channel",
        "mxfp4",
        "nvfp4",
        "fp8",
        "fp8 blocks",
        "int8 groups",
        "fp32",
    }
    for one in launches:
        assert one["shared"] <= 99 << 10, one
        assert one["spilled"] <= 96, one
        assert one["products"] > 0 or one["case"] == "fp32", one


def test_many_rows_are_multiplied_by_torch(monkeypatch):
    monkeypatch.setattr(triton_quantised, "_multiply_int8", None)
    weight, scale = torch.ones(16, 32, dtype=torch.int8, device=DEVICE), torch.ones(16, device=DEVICE)
    x = some(triton_quantised.FEW_ROWS + 1, 32)
    torch.testing.assert_close(
        TritonInt8Linear(weight, scale).apply(x, None), Int8Linear.of(weight, scale).apply(x, None)
    )


def test_these_are_the_kernels_of_a_gpu():
    kernels = TritonKernels()
    assert isinstance(kernels.int8_linear(torch.ones(1, 1, dtype=torch.int8), torch.ones(1)), TritonInt8Linear)
    x = some(3, 48)
    assert torch.equal(kernels.quantise_rows(x)[1], quantise_rows(x)[1])
