"""Products with a fixed tiling, through the interpreter: right, and a row's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import interpreter

from engine.kernels import triton_linear
from engine.kernels.triton_linear import Tiling, TritonLinear, tiling_of
from tests.interpreter import exact_halves

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dot(_, a, b, d, *settings):
    """Every element by itself: numpy's product, which the interpreter takes, rounds by where a row lies."""
    a, b = (each.data.astype(np.float32) for each in (a, b))
    return interpreter.TensorHandle((a[:, :, None] * b[None]).sum(axis=1) + d.data, d.dtype.scalar)


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    with exact_halves():
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles each way in small products."""
    monkeypatch.setattr(triton_linear, "tiling_of", lambda *_: Tiling(16, 16, 16, 4, 2))


def some(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "ins"), [(40, 48), (16, 33), (1, 7)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_float64(small_tiles, dtype, outs, ins, bias):
    weight, offsets = some(outs, ins, dtype=dtype), some(outs, dtype=dtype, seed=1) if bias else None
    method = TritonLinear(weight)
    for rows in (0, 1, 17, 35):
        x = some(rows, ins, dtype=dtype, seed=2)
        expected = torch.nn.functional.linear(
            x.double(), weight.double(), None if offsets is None else offsets.double()
        )
        found = method.apply(x, offsets)
        assert found.dtype is dtype
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * ins**0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_anywhere_among_others(small_tiles, dtype):
    method = TritonLinear(some(40, 70, dtype=dtype))
    mine = some(1, 70, dtype=dtype, seed=3)
    alone = method.apply(mine, None)
    for rows in (2, 15, 16, 33, 50):
        company = some(rows, 70, dtype=dtype, seed=rows)
        for at in {0, rows // 2, rows - 1}:
            company[at] = mine
            assert torch.equal(method.apply(company, None)[at], alone[0])


def test_the_tiles_in_use_do_so_too():
    method = TritonLinear(some(130, 96, dtype=torch.bfloat16))
    x = some(70, 96, dtype=torch.bfloat16, seed=1)
    among = method.apply(x, None)
    for row in (0, 63, 64, 69):
        assert torch.equal(method.apply(x[row : row + 1], None)[0], among[row])


def test_rows_may_be_apart_and_columns_too():
    weight = some(8, 12)
    wide = some(5, 30, seed=1)
    method = TritonLinear(weight)
    assert torch.equal(method.apply(wide[:, 3:15], None), method.apply(wide[:, 3:15].contiguous(), None))
    assert torch.equal(
        method.apply(wide[:, ::2][:, :12], None), method.apply(wide[:, ::2][:, :12].contiguous(), None)
    )


def test_the_tiling_is_the_weights_alone_and_the_sum_is_never_split():
    assert tiling_of(1024, 4096, torch.bfloat16) == Tiling(64, 64, 64, 4, 3)
    assert tiling_of(151936, 4096, torch.bfloat16) == Tiling(64, 128, 64, 4, 3)
    assert tiling_of(1024, 4096, torch.float32) == Tiling(32, 64, 32, 4, 3)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="no fixed tiling; it multiplies float32, bfloat16, float16"):
        TritonLinear(torch.zeros(2, 2, dtype=torch.float64))
