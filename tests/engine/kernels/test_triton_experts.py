"""Products of many experts in one launch, through the interpreter: right for any shares of the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from engine.kernels import triton_experts
from engine.kernels.base import FourBits
from engine.kernels.triton_experts import TritonGroupedProduct, grouped_tiling
from engine.kernels.triton_linear import Tiling
from engine.layers.base import Build
from engine.layers.moe import MoE, Routing
from engine.quantization.fp8 import Fp8Linear
from engine.quantization.int8 import Int8Linear
from engine.quantization.layout import dequantised
from parallel.group import SoloGroup
from parallel.linear import ReplicatedLinear
from tests.interpreter import exact_halves
from tests.long import examples
from tests.triton_compiler import compiled

KINDS = ["fp32", "bf16", "int8", "fp8", "int4", "mxfp4", "nvfp4", "blocks", "groups"]
HELD = [torch.float32, torch.bfloat16, torch.float16]  # scales of whole numbers


@pytest.fixture(autouse=True)
def exact():
    with exact_halves():
        yield


def coded(layer, kind, random, dtype):
    """Give a layer codes, or eight bits, by groups of its inputs, and return what they stand for."""
    outs, ins = layer.weight.shape
    group = ins if ins % 8 else 8
    scale = torch.rand(outs // (2 if kind == "blocks" else 1), ins // group, generator=random)
    zero = whole = None
    if kind == "blocks":
        weight = torch.randn(outs, ins, generator=random).to(torch.float8_e4m3fn)
        plain = weight.float() * scale.repeat_interleave(2, 0).repeat_interleave(group, 1)
    elif kind == "groups":
        weight = torch.randint(-128, 128, (outs, ins), generator=random).to(torch.int8)
        scale = (scale / 64).to(HELD[int(torch.randint(len(HELD), (), generator=random))])
        plain = weight.float() * scale.float().repeat_interleave(group, 1)
    else:
        weight = torch.randint(0, 256, (outs, ins // 2), generator=random).to(torch.uint8)
        scale = torch.randint(118, 126, scale.shape, generator=random).byte() if kind == "mxfp4" else scale / 8
        if kind == "int4":  # experts need not hold theirs in the same bits
            zero = torch.randint(0, 17, scale.shape, generator=random).to(torch.uint8)
            scale = scale.to(HELD[int(torch.randint(len(HELD), (), generator=random))])
        if kind == "nvfp4":
            scale, whole = (scale * 8 + 1).to(torch.float8_e4m3fn), torch.rand(outs, generator=random) / 8
        plain = dequantised(FourBits(weight, scale, zero, whole), torch.float32)
    tensors = {"weight": weight, "weight_scale": scale, "weight_zero": zero, "weight_global_scale": whole}
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    return plain.to(dtype)


def linears(count, ins, outs, kind, bias, seed=0):
    """Return the linear layers of `count` experts, and the weights that they multiply by."""
    random = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    layers, weights = [], []
    for _ in range(count):
        layer = ReplicatedLinear(ins, outs, bias, SoloGroup(), dtype)
        weight = torch.randn(outs, ins, generator=random).to(dtype)
        layer.weight.data = weight
        if bias:
            layer.bias.data = torch.randn(outs, generator=random).to(dtype)
        if kind in ("int8", "fp8"):
            method = Int8Linear if kind == "int8" else Fp8Linear
            scale = method.scale_of(weight.abs().amax(dim=1).float())
            layer.weight = torch.nn.Parameter(method.quantised(weight, scale), requires_grad=False)
            layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
            weight = layer.weight.float().to(dtype).double() * scale[:, None]
        elif kind in ("int4", "mxfp4", "nvfp4", "blocks", "groups"):
            weight = coded(layer, kind, random, dtype)
        layers.append(layer)
        weights.append(weight.double())
    return layers, weights


@settings(max_examples=examples(30))
@given(
    counts=st.lists(st.integers(0, 40) | st.just(0), min_size=1, max_size=9),
    kind=st.sampled_from(KINDS),
    sizes=st.sampled_from([(48, 40), (16, 70), (33, 24), (104, 36)]),
    bias=st.booleans(),
    fixed=st.booleans(),
)
def test_rows_are_multiplied_by_their_experts_weight(counts, kind, sizes, bias, fixed):
    ins, outs = sizes
    ins -= ins % 8 if kind in ("int4", "mxfp4", "nvfp4") else 0
    layers, weights = linears(len(counts), ins, outs, kind, bias)
    product = TritonGroupedProduct(layers)
    if fixed:
        product.fix_tiling()
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    x = torch.randn(sum(counts), ins, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = product.apply(x, torch.tensor(counts).cumsum(0))
    expected = [
        rows.double() @ weight.T + (layer.bias.double() if bias else 0)
        for rows, weight, layer in zip(x.split(counts), weights, layers, strict=True)
    ]
    close = 1e-4 if kind == "fp32" else 4e-2
    torch.testing.assert_close(found.double(), torch.cat(expected), rtol=close, atol=close)
    unbiased = product.apply(x, torch.tensor(counts).cumsum(0), biased=False)
    assert torch.equal(unbiased, found) == (not bias or not len(x))


def test_experts_keep_views_of_one_tensor():
    layers, weights = linears(5, 16, 24, "bf16", True)
    TritonGroupedProduct(layers)
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1
    assert all(torch.equal(layer.weight.double(), weight) for layer, weight in zip(layers, weights, strict=True))
    assert [layer.weight.storage_offset() for layer in layers] == [16 * 24 * index for index in range(5)]


def test_with_a_fixed_tiling_a_rows_bits_do_not_depend_on_its_company():
    layers, _ = linears(3, 64, 48, "bf16", False)
    product = TritonGroupedProduct(layers)
    product.fix_tiling()
    x = torch.randn(150, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ends = torch.tensor([20, 90, 150])
    together = product.apply(x, ends)
    alone = product.apply(x[57:58], torch.tensor([0, 1, 1]))
    assert torch.equal(alone[0], together[57])


@pytest.mark.parametrize("shared", [0, 24])
def test_a_layer_of_experts_gives_the_same_in_one_launch_as_one_by_one(monkeypatch, shared):
    monkeypatch.setattr(triton_experts, "grouped_tiling", lambda *_: Tiling(16, 16, 16, 4, 2))
    routing = Routing(7, 3, renormalise=True)
    layer = MoE(40, 24, "silu", routing, Build(SoloGroup(), torch.float32, 64), shared_inner=shared)
    random = np.random.default_rng(0)
    for parameter in layer.parameters():
        parameter.data = torch.from_numpy(random.normal(size=parameter.shape).astype(np.float32) / 5)
    x = torch.from_numpy(random.normal(size=(29, 40)).astype(np.float32))
    expected = layer(x)
    assert layer.experts.counts_on_host
    layer.experts.use_kernels(Grouping())
    assert not layer.experts.counts_on_host
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


class Grouping:
    """Stands for `TritonKernels`, of which a CPU wants the products alone."""

    grouped_product = staticmethod(TritonGroupedProduct)


def test_an_activation_is_asked_once_for_all_experts():
    """So that nothing is launched for each of them."""
    asked = []
    layer = MoE(16, 8, "silu", Routing(6, 2), Build(SoloGroup(), torch.float32, 64))
    for parameter in layer.parameters():
        parameter.data = torch.ones(parameter.shape)
    layer.experts.activate.register_forward_hook(lambda _, given, found: asked.append(len(found)))
    layer.experts.use_kernels(Grouping())
    layer(torch.ones(5, 16))
    assert asked == [10]


@pytest.mark.timeout(300)
def test_the_kernel_compiles_for_gpus_and_fits_them():
    launches = compiled("tests.engine.kernels.triton_experts_launches")
    assert {one["case"] for one in launches} == {
        "bf16",
        "fp32",
        "int8",
        "fp8",
        "wide",
        "int4",
        "mxfp4",
        "nvfp4",
        "blocks",
        "int8 groups",
    }
    for one in launches:
        assert one["shared"] <= 99 << 10, one
        assert one["spilled"] <= 96, one
        assert one["products"] > 0 or one["case"] == "fp32", one


def test_tilings_have_few_rows_where_experts_get_few():
    assert grouped_tiling(True, 2048, torch.bfloat16).rows == 16
    assert grouped_tiling(False, 2048, torch.bfloat16).rows == 64
