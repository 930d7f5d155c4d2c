"""The small kernels on a GPU, at the sizes of real models, against torch's operations there."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

EPS = 1e-6
ROWS = [1, 33, 8192]


@pytest.fixture(scope="module")
def kernels():
    from engine.kernels.base import TorchKernels
    from engine.kernels.triton_kernels import TritonKernels

    return TritonKernels(), TorchKernels()


def some(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def close(found, expected, steps=2):
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found.float(), expected.float(), rtol=steps * eps, atol=steps * eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1024, 2048, 4096, 5120, 16384])
@pytest.mark.parametrize("rows", ROWS)
def test_norms_and_the_residual(kernels, dtype, size, rows):
    triton, torchs = kernels
    x, weight = some(rows, size, dtype=dtype), some(size, dtype=dtype, seed=1)
    # Sums in another order and roots that are off by a bit or two show where nothing is rounded afterwards.
    steps = 16 if dtype is torch.float32 else 2
    close(triton.rms_norm(x, weight, EPS), torchs.rms_norm(x, weight, EPS), steps)
    ours, theirs = some(rows, size, dtype=dtype, seed=2), some(rows, size, dtype=dtype, seed=2)
    close(triton.add_rms_norm(ours, x, weight, EPS), torchs.add_rms_norm(theirs, x, weight, EPS), steps)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [3072, 8192, 12288, 14336])
@pytest.mark.parametrize("rows", ROWS)
def test_gates(kernels, size, rows):
    triton, torchs = kernels
    x = some(rows, 2 * size) * 4
    close(triton.silu_gate(x), torchs.silu_gate(x))


@pytest.mark.parametrize(("heads", "size"), [(24, 128), (40, 128), (40, 64), (36, 80)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("normed", [True, False])
def test_heads_within_a_merged_product(kernels, heads, size, rows, normed):
    triton, torchs = kernels
    whole = some(rows, heads + 8, size)
    value = whole[:, heads:].clone()
    norms = some(heads, size, seed=1) if normed else None
    turns = torch.arange(rows)[:, None] * torch.linspace(1, 0.01, size // 2)
    turns = torch.stack((turns.cos(), turns.sin()), 1).cuda()
    expected = torchs.norm_rotate(whole[:, :heads].clone(), norms, torchs.rotation(turns), EPS)
    found = triton.norm_rotate(whole[:, :heads], norms, triton.rotation(turns), EPS)
    assert found.data_ptr() == whole.data_ptr()
    difference = (found.float() - expected.float()).abs().max()
    assert difference <= 2 * torch.finfo(torch.bfloat16).eps * expected.float().abs().max()
    assert torch.equal(whole[:, heads:], value)


def test_a_row_has_the_same_bits_in_any_company(kernels):
    triton, _ = kernels
    x, weight = some(1000, 4096), some(4096, seed=1)
    whole = triton.rms_norm(x, weight, EPS), triton.silu_gate(x)
    for first, beyond in ((0, 1), (700, 707), (999, 1000)):
        part = x[first:beyond].clone()
        assert torch.equal(triton.rms_norm(part, weight, EPS), whole[0][first:beyond])
        assert torch.equal(triton.silu_gate(part), whole[1][first:beyond])


@pytest.mark.parametrize("rows", [1, 64, 4096])
@pytest.mark.parametrize("sizes", [(2048, 1536), (768, 2048)])
@pytest.mark.parametrize("kind", ["plain", "mxfp4"])
def test_products_of_experts(rows, sizes, kind):
    """Qwen3-30B-A3B's: each row with its expert's weight, of 128, in one launch."""
    from engine.kernels.base import FourBits
    from engine.kernels.triton_experts import TritonGroupedProduct
    from engine.quantization.layout import dequantised
    from parallel.group import SoloGroup
    from parallel.linear import ReplicatedLinear

    ins, outs = sizes
    layers = [ReplicatedLinear(ins, outs, False, SoloGroup("cuda:0"), torch.bfloat16) for _ in range(128)]
    for number, layer in enumerate(layers):
        layer.weight.data = some(outs, ins, seed=number)
    plain = [layer.weight.float() for layer in layers]
    if kind == "mxfp4":
        for number, layer in enumerate(layers):
            codes = torch.randint(0, 256, (outs, ins // 2), device="cuda", dtype=torch.uint8)
            scale = torch.randint(118, 126, (outs, ins // 32), device="cuda", dtype=torch.uint8)
            layer.weight = torch.nn.Parameter(codes, requires_grad=False)
            layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
            plain[number] = dequantised(FourBits(codes, scale), torch.bfloat16).float()
    product = TritonGroupedProduct(layers)
    x = some(rows, ins, seed=200)
    numbers = (
        torch.randint(128, (rows,), device="cuda", generator=torch.Generator("cuda").manual_seed(1)).sort().values
    )
    ends = torch.searchsorted(numbers, torch.arange(128, device="cuda"), right=True)
    found = product.apply(x, ends)
    first = 0
    for weight, end in zip(plain, ends.tolist(), strict=True):
        expected = x[first:end].float() @ weight.T
        torch.testing.assert_close(found[first:end].float(), expected, rtol=2e-2, atol=0.5)
        first = end
