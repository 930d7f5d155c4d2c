"""Recurrent states on a GPU, at the sizes of real models, whole and in parts, against torch's operations."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

# Groups, heads, depth and width: Qwen3-Next's delta net, Nemotron-H's and Granite 4's Mamba-2.
SIZES = [(16, 32, 128, 128, True), (8, 128, 128, 64, False), (1, 48, 256, 64, False)]
LENGTHS = (17, 1, 40, 3)


@pytest.fixture(scope="module")
def kernels():
    from engine.kernels.base import TorchKernels
    from engine.kernels.triton_kernels import TritonKernels

    return TritonKernels(), TorchKernels()


def some(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def rows_of(lengths, sources, targets):
    from engine.kernels.recurrent import StateRows

    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    return StateRows(*(torch.tensor(each, dtype=torch.int32, device="cuda") for each in (starts, sources, targets)))


def given(groups, heads, depth, width, tokens):
    pairs = (some(tokens, groups, depth, seed=seed) / depth**0.5 for seed in (1, 2))
    rates = (some(tokens, heads, seed=seed).sigmoid() for seed in (4, 5))
    return *pairs, some(tokens, heads, width, dtype=torch.bfloat16, seed=3), *rates


@pytest.mark.parametrize(("groups", "heads", "depth", "width", "delta"), SIZES)
def test_states_are_torchs_and_no_cut_changes_a_bit(kernels, groups, heads, depth, width, delta):
    triton, torchs = kernels
    rows = rows_of(LENGTHS, (-1, 1, 2, -1), (0, 1, 4, 3))
    inputs = given(groups, heads, depth, width, sum(LENGTHS))
    ours, theirs = (some(6, heads, depth, width, seed=6) for _ in range(2))
    found = triton.outer_product_state(*inputs, ours, rows, delta)
    expected = torchs.outer_product_state(*inputs, theirs, rows, delta)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    parts = some(6, heads, depth, width, seed=6)
    for first, beyond, source in ((0, 5, -1), (5, 17, 0)):
        part = triton.outer_product_state(
            *(each[first:beyond] for each in inputs), parts, rows_of([beyond - first], [source], [0]), delta
        )
        assert torch.equal(part, found[first:beyond])
    assert torch.equal(parts[0], ours[0])


def test_convolutions_are_torchs(kernels):
    triton, torchs = kernels
    rows = rows_of(LENGTHS, (-1, 1, 2, -1), (0, 1, 4, 3))
    x, weight, bias = some(sum(LENGTHS), 8192, dtype=torch.bfloat16), some(4, 8192, seed=1), some(8192, seed=2)
    ours, theirs = (some(6, 3, 8192, seed=3) for _ in range(2))
    found = triton.short_conv(x, weight, bias, ours, rows, True)
    expected = torchs.short_conv(x, weight, bias, theirs, rows, True)
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(ours, theirs)
    heads = some(33, 16, 128, dtype=torch.bfloat16)
    torch.testing.assert_close(triton.unit_heads(heads, 1e-6, 0.1), torchs.unit_heads(heads, 1e-6, 0.1))
