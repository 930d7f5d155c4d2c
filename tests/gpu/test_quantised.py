"""Quantised products on a GPU against their arithmetic in fp32 and fp64, and whole models with such weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no units for fp8"
)
SHAPES = [(1024, 1024), (6144, 4096), (4096, 12288)]  # out, in: of Qwen3-0.6B and 8B
ROWS = [1, 33, 512]


def some(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def in_format(name, weight):
    from engine.quantization.select import METHODS

    form = METHODS[name]
    scale = form.scale_of(weight.abs().amax(dim=1).float())
    return form.quantised(weight, scale), scale


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scaled_products_are_those_of_the_reference(shape, rows, dtype):
    from engine.kernels.base import quantise_rows
    from engine.quantization.fp8 import Fp8Linear, exact_product

    weight, scale = in_format("fp8", some(*shape, seed=1))
    x, bias = some(rows, shape[1], dtype=dtype), some(shape[0], dtype=dtype, seed=2)
    found = Fp8Linear.of(weight, scale).apply(x, bias)
    expected = exact_product(*quantise_rows(x), weight, scale, torch.float32) + bias.float()
    # Fast accumulation on Hopper, of bfloat16 results, keeps 13 bits or so of a partial sum of 32 products each.
    assert found.dtype is dtype
    allowed = 2**-7 if dtype is torch.bfloat16 else 2**-8
    assert float((found.float() - expected).norm() / expected.norm()) < allowed


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1024), (33, 4096), (512, 12288)], ids=str)
def test_rows_are_quantised_to_the_bits_of_torch(shape, dtype):
    from engine.kernels.base import quantise_rows
    from engine.kernels.triton_linear import quantise_rows_in_one_pass

    x = some(*shape, dtype=dtype)
    found, scales = quantise_rows_in_one_pass(x)
    rows, expected = quantise_rows(x)
    assert torch.equal(scales, expected)
    assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))


@needs_fp8
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(poison):
    from engine.kernels.triton_linear import quantise_rows_in_one_pass

    x = some(3, 1024)
    x[1, 7] = poison
    found, scales = quantise_rows_in_one_pass(x)
    assert (found.float() * scales)[1, 7].isnan()
    assert torch.isfinite(found.float() * scales)[[0, 2]].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_products_are_those_of_the_weights_they_stand_for(shape, rows, dtype):
    from engine.kernels.triton_linear import TritonInt8Linear

    weight, scale = in_format("int8", some(*shape, seed=1))
    x, bias = some(rows, shape[1], dtype=dtype), some(shape[0], dtype=dtype, seed=2)
    found = TritonInt8Linear(weight, scale).apply(x, bias)
    exact = x.double() @ (weight.double() * scale.double()[:, None]).t() + bias.double()
    assert float((found.double() - exact).norm() / exact.norm()) < 2**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("kind", ["int4", "mxfp4", "nvfp4", "int8", pytest.param("fp8", marks=needs_fp8)])
def test_coded_products_are_those_of_the_weights_they_stand_for(kind, rows, dtype):
    from engine.kernels.base import FourBits
    from engine.kernels.triton_coded import TritonBlockLinear, TritonFourBitLinear
    from engine.quantization.layout import dequantised

    outs, ins, group = 1536, 4096, {"mxfp4": 32, "nvfp4": 16}.get(kind, 128)
    if kind not in ("int8", "fp8"):
        codes = torch.randint(0, 256, (outs, ins // 2), device="cuda", dtype=torch.uint8)
        scale = some(outs, ins // group, dtype=torch.float32, seed=1) / 16
        zero = whole = None
        if kind == "int4":
            zero = torch.randint(0, 17, scale.shape, device="cuda", dtype=torch.uint8)
        elif kind == "mxfp4":
            scale = torch.randint(118, 126, scale.shape, device="cuda", dtype=torch.uint8)
        else:
            scale = (scale * 100).to(torch.float8_e4m3fn)
            whole = some(outs, dtype=torch.float32, seed=4).abs() / 50
        weight = FourBits(codes, scale, zero, whole)
        method, plain = TritonFourBitLinear(weight), dequantised(weight, dtype)
    else:
        weight = (some(outs, ins, seed=1) * 40).to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        rows_of_block = 1 if kind == "int8" else group
        scale = some(outs // rows_of_block, ins // group, dtype=torch.float32, seed=2) / 64
        wide = scale.repeat_interleave(rows_of_block, 0).repeat_interleave(group, 1)
        method, plain = TritonBlockLinear(weight, scale), (weight.float() * wide).to(dtype)
    x, bias = some(rows, ins, dtype=dtype), some(outs, dtype=dtype, seed=3)
    exact = x.double() @ plain.double().t() + bias.double()
    assert float((method.apply(x, bias).double() - exact).norm() / exact.norm()) < 2**-8


@pytest.mark.parametrize("quantization", ["int8", pytest.param("fp8", marks=needs_fp8)])
def test_a_model_holds_half_and_says_nearly_the_same(tmp_path, quantization):
    from engine.config import EngineConfig
    from engine.loader.checkpoint import open_model
    from engine.loader.weights import load_model
    from engine.quantization.select import quantization_of
    from parallel.group import SoloGroup
    from parallel.linear import ParallelLinear
    from tests.parity.tiny_models import make

    make("llama", tmp_path)
    folder = open_model(str(tmp_path))
    asked = quantization_of(EngineConfig(str(tmp_path), quantization=quantization), folder.config.quantization)
    group = SoloGroup("cuda:0")
    plain = load_model(folder, 64, group, torch.bfloat16)
    made = load_model(folder, 64, group, torch.bfloat16, asked)
    x = some(5, 64)
    for one, other in zip(plain.layers, made.layers, strict=True):
        for name, layer in one.named_modules():
            if isinstance(layer, ParallelLinear):
                found = other.get_submodule(name)
                assert 2 * found.weight.nbytes == layer.weight.nbytes
                inputs = x if layer.weight.shape[1] == 64 else some(5, layer.weight.shape[1])
                expected = layer(inputs).float()
                assert float((found(inputs).float() - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("quantization", ["int8", pytest.param("fp8", marks=needs_fp8)])
def test_an_engine_generates_with_quantised_weights(tmp_path, quantization):
    from engine.config import EngineConfig
    from engine.worker.runner import ModelRunner
    from parallel.group import SoloGroup
    from tests.parity.stepping import Stepper
    from tests.parity.tiny_models import make

    make("llama", tmp_path)
    config = EngineConfig(
        str(tmp_path), device="cuda", dtype="bfloat16", quantization=quantization, num_kv_blocks=64, max_num_seqs=8
    )
    prompt, found = list(range(5, 17)), []
    for eager in (False, True):
        runner = ModelRunner(replace(config, enforce_eager=eager), SoloGroup("cuda:0"))
        assert (runner._forward.graphs is None or not runner._forward.graphs.pool.captured) == eager
        (sequence,) = Stepper(runner).generate([prompt], 9)
        found.append(sequence.tokens[len(prompt) :])
    assert found[0] == found[1], "one sequence is padded to one: a graph runs the same kernels"
    assert len(found[0]) == 9
