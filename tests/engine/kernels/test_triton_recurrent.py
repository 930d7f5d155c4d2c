"""Recurrent states in Triton against torch's operations, through the interpreter, and what they compile to."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.base import TorchKernels
from engine.kernels.recurrent import StateRows
from engine.kernels.triton_kernels import TritonKernels
from tests.interpreter import exact_halves
from tests.triton_compiler import compiled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OURS, TORCHS = TritonKernels(), TorchKernels()
SLOTS = 6
# Tokens of each row, and the slots that its state comes from and goes to: a new one, one in place, one that moves.
LENGTHS, SOURCES, TARGETS = (5, 1, 2), (-1, 3, 4), (0, 3, 1)


@pytest.fixture(autouse=True)
def rounding():
    with exact_halves():
        yield


def some(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rows_of(lengths=LENGTHS, sources=SOURCES, targets=TARGETS):
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return StateRows(*(torch.as_tensor(each).int().to(DEVICE) for each in (starts, sources, targets)))


def close(found, expected, steps=8):
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=steps * eps, atol=steps * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "taps", "bias", "silu"), [(10, 4, True, True), (300, 3, False, False), (1, 2, True, False)]
)
def test_short_convolutions_are_torchs(size, taps, bias, silu, dtype):
    x = some(sum(LENGTHS), size + 3, dtype=dtype)[:, :size]  # tokens with a gap behind each
    weight, offset = some(taps, size, seed=1), some(size, seed=2) if bias else None
    ours, torchs = (some(SLOTS, taps - 1, size, seed=3) for _ in range(2))
    found = OURS.short_conv(x, weight, offset, ours, rows_of(), silu)
    close(found, TORCHS.short_conv(x, weight, offset, torchs, rows_of(), silu))
    assert torch.equal(ours, torchs)  # they are copies of inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_heads_are_torchs(dtype):
    x = some(4, 40, dtype=dtype)[:, :30].unflatten(1, (3, 10))
    close(OURS.unit_heads(x, 1e-6, 0.3), TORCHS.unit_heads(x, 1e-6, 0.3))


def states(groups, heads, depth, width, dtype, tokens):
    """Return queries, keys, values, decays and gains of so many tokens."""
    query, key = some(tokens, groups, depth, seed=1) / depth**0.5, some(tokens, groups, depth, seed=2) / depth**0.5
    value = some(tokens, heads * width + 2, dtype=dtype, seed=3)[:, : heads * width].unflatten(1, (heads, width))
    return query, key, value, some(tokens, heads, seed=4).sigmoid(), some(tokens, heads, seed=5).sigmoid()


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("groups", "heads", "depth", "width"), [(1, 1, 1, 1), (2, 4, 16, 8), (1, 3, 20, 70), (2, 2, 100, 48)]
)
def test_states_of_outer_products_are_torchs(groups, heads, depth, width, dtype, delta):
    given = states(groups, heads, depth, width, dtype, sum(LENGTHS))
    ours, torchs = (some(SLOTS, heads, depth, width, seed=6) for _ in range(2))
    found = OURS.outer_product_state(*given, ours, rows_of(), delta)
    close(found, TORCHS.outer_product_state(*given, torchs, rows_of(), delta), steps=32)
    close(ours, torchs, steps=32)
    kept = [slot for slot in range(SLOTS) if slot not in TARGETS]
    assert torch.equal(ours[kept], some(SLOTS, heads, depth, width, seed=6)[kept])


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_where_a_sequence_is_cut_changes_no_bit(cut):
    given, x, weight = states(2, 4, 16, 24, torch.bfloat16, 6), some(6, 40, dtype=torch.bfloat16), some(4, 40, seed=7)
    whole, parts = (some(2, 4, 16, 24, seed=6) for _ in range(2))
    seen, seen_parts = (some(2, 3, 40, seed=8) for _ in range(2))
    once = rows_of([6], [-1], [1])
    read, mixed = (
        OURS.outer_product_state(*given, whole, once, True),
        OURS.short_conv(x, weight, None, seen, once, True),
    )
    for first, beyond, source in ((0, cut, -1), (cut, 6, 1)):
        row, part = rows_of([beyond - first], [source], [1]), slice(first, beyond)
        again = OURS.outer_product_state(*(each[part] for each in given), parts, row, True)
        assert torch.equal(again, read[part])
        assert torch.equal(OURS.short_conv(x[part], weight, None, seen_parts, row, True), mixed[part])
    assert torch.equal(whole, parts)
    assert torch.equal(seen, seen_parts)


def test_a_step_without_rows_computes_nothing():
    nothing = rows_of([], [], [])
    state = some(SLOTS, 2, 4, 8)
    assert OURS.outer_product_state(*states(1, 2, 4, 8, torch.float32, 0), state, nothing, True).shape == (0, 2, 8)
    assert torch.equal(state, some(SLOTS, 2, 4, 8))
    assert OURS.short_conv(some(0, 8), some(3, 8), None, some(SLOTS, 2, 8), nothing, True).shape == (0, 8)
    assert OURS.unit_heads(some(0, 2, 8), 1e-6, 1.0).shape == (0, 2, 8)


@pytest.mark.timeout(300)
def test_the_kernels_compile_for_gpus_and_fit_them():
    launches = compiled("tests.engine.kernels.triton_recurrent_launches")
    assert {one["kernel"] for one in launches} == {
        "_short_conv_kernel",
        "_unit_heads_kernel",
        "_outer_product_state_kernel",
    }
    for one in launches:
        assert one["spilled"] == 0, one
        assert one["shared"] <= 99 << 10, one
