"""Layers that hold a checkpoint's quantised weights, against exact arithmetic: products, bits, splits, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.kernels import compiler
from engine.kernels.base import FourBits, GroupedProduct, Kernels, TorchKernels
from engine.kernels.native_linear import NativeBlockLinear, NativeFourBitLinear, NativeLinear, product_library
from engine.kernels.select import select_kernels
from engine.layers.base import Build
from engine.layers.mlp import Gate
from engine.layers.moe import Experts
from engine.models.blueprint import BlueprintGroup
from engine.quantization import widened
from engine.quantization.block_linear import BlockLinear
from engine.quantization.four_bits import FourBitLinear, TorchInt4Linear
from engine.quantization.fp8_weight import Fp8WeightLinear
from engine.quantization.layout import dequantised
from engine.quantization.method import QuantizedLinear
from engine.quantization.select import choose_products
from engine.quantization.spec import FOUR_BITS, QuantizationSpec
from engine.worker.meta_kernels import MetaGroupedProduct
from parallel.group import SoloGroup
from parallel.linear import LinearMethod, MergedColumnParallelLinear, RowParallelLinear
from parallel.parameter import TensorSource

GROUP = SoloGroup()
INT4 = QuantizationSpec("gptq", "int4", layout="gptq", group=32)
NVFP4 = QuantizationSpec("modelopt", "nvfp4", layout="modelopt", group=16)
MXFP4 = QuantizationSpec("compressed-tensors", "mxfp4", layout="mxfp4-pack-quantized", group=32)
FP8 = QuantizationSpec("compressed-tensors", "fp8", plain_activations=True)
BLOCKS = QuantizationSpec("fp8", "fp8", block=(48, 32), scale_name="weight_scale_inv")
INT8 = QuantizationSpec("gptq", "int8", layout="gptq", block=(1, 32))
OUTS, INS = 192, 320  # 144 and 48 outputs: blocks of 48, while 64 outputs are made plain at a time
ROWS = (1, 2, 7, 33, 64, 129)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def method_of(spec: QuantizationSpec) -> QuantizedLinear:
    if spec.weights in FOUR_BITS:
        return FourBitLinear(spec)
    return BlockLinear(spec) if spec.block else Fp8WeightLinear(spec)


def filled(spec: QuantizationSpec, dtype: torch.dtype = torch.float32) -> tuple[MergedColumnParallelLinear, Tensor]:
    """Return a layer of two parts that holds random weights, and what they stand for."""
    layer = MergedColumnParallelLinear(INS, [OUTS - 48, 48], True, GROUP, dtype)
    layer.method = method_of(spec)
    layer.method.create(layer, "layer")
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        if parameter is getattr(layer, "weight_zero", None):
            made = torch.randint(0, 17, parameter.shape, generator=generator).to(torch.uint8)
        elif parameter is layer.weight_scale and parameter.dtype is torch.uint8:
            made = torch.randint(126, 129, parameter.shape, generator=generator).to(torch.uint8)  # exponents
        elif parameter.dtype is torch.uint8:
            made = torch.randint(0, 256, parameter.shape, generator=generator).to(torch.uint8)
        elif parameter.dtype is torch.int8:
            made = torch.randint(-128, 128, parameter.shape, generator=generator).to(torch.int8)
        elif parameter.dtype is torch.float8_e4m3fn:
            made = torch.randn(parameter.shape, generator=generator).mul(40).to(parameter.dtype)
        else:
            made = torch.rand(parameter.shape, generator=generator) + 0.5
        parameter.load(TensorSource(made))
    layer.method.load(layer)
    if spec.weights in FOUR_BITS:
        zero, of_all = (getattr(layer, name, None) for name in ("weight_zero", "weight_global_scale"))
        whole = dequantised(FourBits(layer.weight, layer.weight_scale, zero, of_all), torch.float64)
    else:
        scale = layer.weight_scale.view(len(layer.weight_scale), -1)
        rows, columns = OUTS // scale.shape[0], INS // scale.shape[1]
        whole = layer.weight.double() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return layer, whole


def kernels_of(name: str, dtype: torch.dtype) -> Kernels:
    return TorchKernels() if name == "torch" else select_kernels(64, dtype, torch.device("cpu"))


SPECS = {
    "32": INT4,
    "16": replace(INT4, group=16),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "fp8": FP8,
    "blocks": BLOCKS,
    "int8": INT8,
}
CASES = [(kind, "native", dtype) for kind in SPECS for dtype in (torch.float32, torch.bfloat16)]
CASES += [(kind, "torch", torch.float32) for kind in ("blocks", "mxfp4", "int8")]


@pytest.mark.parametrize(("kind", "kernels", "dtype"), CASES)
def test_products_are_exact_and_a_row_has_the_same_bits_in_any_company(kind, kernels, dtype, monkeypatch) -> None:
    monkeypatch.setattr(widened, "PLAIN_WEIGHTS", 64 * INS)
    spec = SPECS[kind]
    layer, whole = filled(spec, dtype)
    choose_products(layer, kernels_of(kernels, dtype))
    x = normal(140, INS, dtype=dtype)
    together = layer(x)
    exact = x.double() @ whole.t() + layer.bias.double()
    limit = 2**-6 if dtype is torch.bfloat16 else 1e-5
    assert together.dtype is dtype
    assert float((together.double() - exact).abs().max()) <= limit * float(exact.abs().max())
    for rows in ROWS:
        for start in (0, 140 - rows):
            assert torch.equal(layer(x[start : start + rows]), together[start : start + rows])
    assert layer(x[:0]).shape == (0, OUTS)


def assert_rounded_once(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Of products with `weight`, which no rounding of it precedes, the result alone is rounded to bfloat16."""
    products = x.double() @ weight.t()
    most = 2**-8 * products.abs() + 1e-6 * (x.double().abs() @ weight.abs().t())
    assert bool(((got.double() - products - bias.double()).abs() <= most + 2**-8 * bias.double().abs()).all())


@pytest.mark.parametrize("isa", compiler.isas() or [compiler.NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("outs", "ins", "group", "zeros"),
    [
        *[
            (96, 64, 32, True),
            (200, 384, 128, False),
            (70, 1040, 1040, True),
            (64, 96, 16, True),
            (72, 768, 96, False),
        ],
        *[(200, 384, 32, None), (70, 96, 16, None)],  # of E2M1, by exponents or by e4m3
    ],
)
def test_four_bits_multiply_as_the_weights_that_they_stand_for(monkeypatch, isa, dtype, outs, ins, group, zeros):
    """With all that this CPU can be taken for: bit for bit, or more exactly where the sums of groups are scaled."""
    monkeypatch.setenv(compiler.ISA_VARIABLE, isa)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (outs, ins // 2), generator=generator).to(torch.uint8)
    scale, held, of_all = torch.rand(outs, ins // group, generator=generator), "float32", None
    if zeros is False:
        scale, held = scale.bfloat16().float(), "bfloat16"
    elif zeros is None and group == 32:
        scale, held = torch.randint(118, 128, scale.shape, generator=generator).to(torch.uint8), "uint8"
    elif zeros is None:
        scale, of_all = (scale * 400).to(torch.float8_e4m3fn), torch.rand(outs, generator=generator) / 400
        held = "float8_e4m3fn"
    elif group == 16:
        scale, held = scale.half().float(), "float16"
    zero = None if zeros is None else torch.full((outs, ins // group), 8, dtype=torch.uint8)
    if zeros and zero is not None:
        zero = torch.randint(0, 17, zero.shape, generator=generator).to(torch.uint8)
    library, single = product_library(dtype), product_library(torch.float32)
    if library is None or single is None:
        pytest.skip("there is no compiler")
    weight = FourBits(codes, scale, zero, of_all)
    assert NativeFourBitLinear.supports(library, weight)
    method = NativeFourBitLinear(library, weight, dtype, threads=2)
    if held != "float16" or library.holds_halves():
        assert method.describe().endswith(f", scales in {held}")
        of_group = getattr(torch, held).itemsize + (1 if zeros else 0)
        of_output = ins // 2 + ins // group * of_group + (0 if of_all is None else 4)
        assert sum(tensor.nbytes for tensor in method.tensors()) == -(-outs // 64) * 64 * of_output
    by_group = library.scales_sums(ins, library.may_multiply_by_tiles())
    widens = dtype is torch.bfloat16 and library.packing_depth() == 1
    as_plain, by = (torch.float32, single) if widens else (dtype, library)
    plain = NativeLinear(by, dequantised(weight, as_plain), threads=2)
    whole = dequantised(weight, torch.float64)
    bias = normal(outs, dtype=dtype)
    x = normal(511, ins, dtype=dtype)  # of which a band has 258
    together = method.apply(x, bias)
    for rows in (1, 2, 5, 7, 13, 40, 300, 511):
        got = method.apply(x[:rows], bias)
        assert torch.equal(got, together[:rows])
        if by_group or of_all is not None:  # sums, not weights, are multiplied by what all have in common
            assert_rounded_once(got, x[:rows], whole, bias)
        else:
            assert torch.equal(got, plain.apply(x[:rows].to(as_plain), bias.to(as_plain)).to(dtype))


@pytest.mark.parametrize("isa", compiler.isas() or [compiler.NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("outs", "ins", "group"), [(96, 64, 64), (200, 384, 96), (70, 608, 608), (64, 64, 32)])
def test_eight_bits_multiply_as_the_weights_that_they_stand_for(monkeypatch, isa, dtype, outs, ins, group, kind):
    """With all that this CPU can be taken for: bit for bit, or more exactly where the sums of groups are scaled.

    Every number of the kind is among the weights.
    """
    monkeypatch.setenv(compiler.ISA_VARIABLE, isa)
    library, single = product_library(dtype), product_library(torch.float32)
    if library is None or single is None:
        pytest.skip("there is no compiler")
    numbers = torch.tensor([code for code in range(256) if kind == "int8" or code & 127 != 127], dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    codes = numbers[torch.randint(0, len(numbers), (outs * ins,), generator=generator)]
    codes[: len(numbers)] = numbers
    weight = codes.view(outs, ins).view(getattr(torch, kind))
    scale, held = torch.rand(outs, ins // group, generator=generator), "float32"
    if group == 96:
        scale, held = scale.bfloat16().float(), "bfloat16"
    elif group == 32:
        scale, held = torch.exp2(torch.randint(-9, 3, scale.shape, generator=generator).float()), "uint8"
    assert NativeBlockLinear.supports(weight, scale)
    method = NativeBlockLinear(library, weight, scale, dtype, threads=2)
    assert method.describe().endswith(f", scales in {held}")
    whole = weight.double() * scale.double().repeat_interleave(group, 1)
    widens = dtype is torch.bfloat16 and library.packing_depth() == 1
    as_plain, by = (torch.float32, single) if widens else (dtype, library)
    plain = NativeLinear(by, (weight.float() * scale.repeat_interleave(group, 1)).to(as_plain), threads=2)
    by_group = library.scales_sums(ins, library.may_multiply_by_tiles())
    bias = normal(outs, dtype=dtype)
    x = normal(511, ins, dtype=dtype)
    together = method.apply(x, bias)
    for rows in (1, 2, 5, 7, 13, 40, 511):
        got = method.apply(x[:rows], bias)
        assert torch.equal(got, together[:rows])
        if by_group:
            assert_rounded_once(got, x[:rows], whole, bias)
        else:
            assert torch.equal(got, plain.apply(x[:rows].to(as_plain), bias.to(as_plain)).to(dtype))
    of_output = ins + ins // group * getattr(torch, held).itemsize
    assert sum(tensor.nbytes for tensor in method.tensors()) == -(-outs // 64) * 64 * of_output
    codes[7] = 127
    assert NativeBlockLinear.supports(weight, scale) == (kind == "int8")


def test_torchs_product_takes_the_place_of_codes_and_holds_no_more_than_they_did() -> None:
    layer, _ = filled(INT4, torch.bfloat16)
    before = sum(parameter.nbytes for parameter in layer.parameters())
    weight = FourBits(layer.weight, layer.weight_scale, layer.weight_zero)
    supported = TorchInt4Linear.supports(weight, torch.bfloat16)
    choose_products(layer, TorchKernels())
    assert isinstance(layer.method, TorchInt4Linear if supported else FourBitLinear)
    held = sum(parameter.nbytes for parameter in layer.parameters()) + sum(
        map(Tensor.nbytes.__get__, layer.method.tensors())
    )
    assert held <= before if supported else held == 2 * before - layer.bias.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scales_are_held_in_as_many_bits_as_on_disk(dtype) -> None:
    """On GPUs, whose kernels read them there, and until CPUs' kernels have taken theirs."""
    layer, _ = filled(INT4)
    stored = (torch.rand(layer.weight_scale.shape, generator=torch.Generator().manual_seed(2)) / 300).to(dtype)
    before = layer.weight_scale.data = torch.zeros(stored.shape)
    layer.weight_scale.load(TensorSource(stored))
    layer.method.load(layer)
    assert layer.weight_scale.dtype is dtype
    assert layer.weight_scale.nbytes * 4 == before.nbytes * dtype.itemsize
    whole = dequantised(FourBits(layer.weight, stored.float(), layer.weight_zero), torch.float32)
    x = normal(3, INS)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, whole, layer.bias))
    choose_products(layer, kernels_of("native", torch.float32))
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, whole, layer.bias))


def test_a_kernel_is_given_codes_scales_and_zeros_once() -> None:
    layer, whole = filled(INT4)
    given = []

    class Own(LinearMethod):
        def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            return torch.nn.functional.linear(x, whole.to(x.dtype), bias)

    class WithInt4(TorchKernels):
        def four_bit_linear(self, weight: FourBits) -> LinearMethod:
            given.append([(tuple(each.shape), each.dtype) for each in weight.held()])
            return Own()

    choose_products(layer, WithInt4())
    groups = INS // 32
    assert given == [
        [((OUTS, INS // 2), torch.uint8), ((OUTS, groups), torch.float32), ((OUTS, groups), torch.uint8)]
    ]
    assert isinstance(layer.method, Own)
    assert [each.numel() for each in (layer.weight, layer.weight_scale, layer.weight_zero)] == [0, 0, 0]


def test_a_weight_is_made_plain_without_a_copy_from_the_host(monkeypatch) -> None:
    """Which a CUDA graph that is recorded cannot hold."""
    layer, whole = filled(MXFP4)
    monkeypatch.setattr(torch, "tensor", None)
    found = layer(normal(3, INS))
    monkeypatch.undo()
    exact = normal(3, INS).double() @ whole.t() + layer.bias.double()
    assert float((found.double() - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


REORDERED = replace(INT4, reordered=True)


@pytest.mark.parametrize("spec", [INT4, MXFP4, BLOCKS, INT8, REORDERED, None])
def test_experts_are_multiplied_at_once_only_by_what_says_all_of_their_weights(spec) -> None:
    experts = Experts(2, 64, [32, 32], 32, Gate("silu"), Build(GROUP, torch.float32, 8))
    for layer in [*experts.up.values(), *experts.down.values()] if spec else []:
        layer.method = method_of(spec)
        layer.method.create(layer, "layer")

    class Grouping(TorchKernels):
        def grouped_product(self, layers) -> GroupedProduct:
            return MetaGroupedProduct(len(layers[0].weight))

    experts.use_kernels(Grouping())
    assert (experts.grouped is None) == (spec is REORDERED)


def test_experts_that_are_held_unlike_are_multiplied_one_by_one() -> None:
    """A checkpoint may leave single ones plain, or hold them otherwise."""
    experts = Experts(3, 64, [32, 32], 32, Gate("silu"), Build(GROUP, torch.float32, 8))
    for number in ("0", "2"):
        experts.up[number].method = method_of(MXFP4)
        experts.up[number].method.create(experts.up[number], "layer")

    class Grouping(TorchKernels):
        def grouped_product(self, layers) -> GroupedProduct:
            raise AssertionError("these have no one form")

    experts.use_kernels(Grouping())
    assert experts.grouped is None


def test_what_is_made_plain_for_each_product_is_told(caplog) -> None:
    """Groups that ranks cut to 8 are none that the compiled products of bfloat16 take two inputs at a time of."""
    layer, _ = filled(replace(INT4, group=8), torch.bfloat16)
    choose_products(layer, TorchKernels())
    told = "made plain for each product, which is slow: 1 of FourBitLinear 192x320 by 8"
    assert (told in caplog.text) == (not isinstance(layer.method, TorchInt4Linear))


def test_what_rounds_otherwise_is_described_otherwise() -> None:
    found = [filled(spec)[0].method.describe() for spec in (INT4, replace(INT4, group=16), MXFP4, FP8, BLOCKS, INT8)]
    found += [filled(INT4, torch.bfloat16)[0].method.describe()]
    layer, _ = filled(INT4, torch.bfloat16)
    choose_products(layer, TorchKernels())
    assert len(set(found)) == 6
    library = product_library(torch.bfloat16)
    kinds = 1 if library is None or library.packing_depth() == 1 else 2  # of how many inputs are taken at a time
    assert library is None or len(set(native_descriptions())) == 4 * kinds
    assert not isinstance(layer.method, TorchInt4Linear) or layer.method.describe() not in found


def native_descriptions() -> list[str]:
    """Of both dtypes: they are taken one input at a time and, where this CPU has dot products, two."""
    found = []
    for spec in (INT4, replace(INT4, group=16), MXFP4, FP8):
        for dtype in (torch.float32, torch.bfloat16):
            layer, _ = filled(spec, dtype)
            choose_products(layer, kernels_of("native", dtype))
            found.append(layer.method.describe())
    return found


def created(spec: QuantizationSpec, ins: int, ranks: int) -> RowParallelLinear:
    layer = RowParallelLinear(ins, 64, False, BlueprintGroup(ranks), torch.float32)
    layer.method = method_of(spec)
    layer.method.create(layer, "layers.0.mlp.down")
    return layer


def test_ranks_that_cut_a_group_hold_its_scale_for_their_part() -> None:
    layer = created(replace(INT4, group=64), 192, 2)
    assert layer.weight.shape == (64, 48)
    assert layer.weight_scale.shape == layer.weight_zero.shape == (64, 96 // 32)
    blocks = created(BLOCKS, 192, 4)
    assert blocks.weight_scale.shape == (64 // 16, 48 // 16)


@pytest.mark.parametrize(
    ("spec", "ins", "ranks", "error", "words"),
    [
        (replace(INT4, reordered=True), 64, 2, ConfigError, ["desc_act", "tensor_parallel_size=1"]),
        (INT4, 64 * 3 + 8, 1, CheckpointError, ["200 inputs", "group_size = 32"]),
        (replace(INT4, group=0), 60, 1, CheckpointError, ["60 inputs", "multiple of 8"]),
        (INT4, 160, 40, ConfigError, ["tensor_parallel_size=40", "4 inputs on each rank"]),
    ],
)
def test_sizes_that_cannot_be_held_so_are_refused_before_anything_is_read(spec, ins, ranks, error, words) -> None:
    with pytest.raises(error) as refusal:
        created(spec, ins, ranks)
    for word in (*words, "layers.0.mlp.down"):
        assert word in str(refusal.value)


def test_which_layers_a_spec_holds() -> None:
    other = QuantizationSpec("compressed-tensors", "fp8", targets=("re:.*self_attn.*", "model.layers.1.mlp.up_proj"))
    spec = replace(INT4, ignore=("lm_head", "re:.*layers\\.0\\..*", "*.experts.7.*", "gate"), others=(other,))
    held = {
        "model.layers.0.mlp.up_proj": None,
        "model.layers.1.mlp.up_proj": other,
        "model.layers.1.mlp.gate_proj": spec,
        "model.layers.1.mlp.gate": None,
        "model.layers.2.self_attn.q_proj": other,
        "model.layers.2.mlp.experts.7.up_proj": None,
        "model.layers.2.mlp.experts.6.up_proj": spec,
    }
    assert {name: spec.of(name) for name in held} == held
    assert other.of("model.layers.1.mlp.down_proj") is None
