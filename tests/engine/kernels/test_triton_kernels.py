"""The small Triton kernels against torch's operations, through the interpreter, and what they compile to."""

import json
import os
import subprocess
import sys
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from engine.config import EngineConfig
from engine.kernels.base import TorchKernels
from engine.kernels.triton_kernels import WIDEST, TritonKernels
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.interpreter import exact_halves
from tests.long import examples, long
from tests.parity.stepping import Stepper
from tests.parity.tiny_models import check_against, make, prompts
from tests.triton_compiler import compiled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OURS, TORCHS = TritonKernels(), TorchKernels()
EPS = 1e-5


@pytest.fixture(autouse=True)
def rounding():
    with exact_halves():
        yield


def some(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found, expected, steps=1):
    """Equal but for `steps` units in the last place: sums in another order may round otherwise."""
    torch.testing.assert_close(found, expected, rtol=steps * torch.finfo(expected.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 17, 64, 100, 896])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_norms_are_torchs(dtype, size, rows):
    x, weight = some(rows, size, dtype=dtype), some(size, dtype=dtype, seed=1)
    close(OURS.rms_norm(x, weight, EPS), TORCHS.rms_norm(x, weight, EPS), steps=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_residual_takes_the_sum_and_the_norm_is_the_sums(dtype, rows):
    x, weight = some(rows, 100, dtype=dtype), some(100, dtype=dtype, seed=1)
    ours, torchs = some(rows, 100, dtype=dtype, seed=2), some(rows, 100, dtype=dtype, seed=2)
    close(OURS.add_rms_norm(ours, x, weight, EPS), TORCHS.add_rms_norm(torchs, x, weight, EPS), steps=4)
    assert torch.equal(ours, torchs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 96, 1100])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_gates_are_torchs(dtype, size, rows):
    x = some(rows, 2 * size, dtype=dtype) * 8
    close(OURS.silu_gate(x), TORCHS.silu_gate(x), steps=2)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # exp(200) is infinite, as it should be
def test_gates_far_out_are_finite_and_nan_stays_nan():
    found = OURS.silu_gate(torch.tensor([[-200.0, 200.0, torch.nan, 2.0, 3.0, 1.0]], device=DEVICE))[0]
    assert found[:2].tolist() == [0.0, 600.0]
    assert found[2].isnan()


def angles(tokens, size):
    turns = torch.arange(tokens)[:, None] * torch.linspace(1, 0.01, size // 2)
    return torch.stack((turns.cos(), turns.sin()), 1).to(DEVICE)


def qkv(tokens, heads, size, dtype):
    """Return the queries and keys within a merged product, and the whole of it."""
    whole = some(tokens, heads + 2, size, dtype=dtype)
    return whole[:, :heads], whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(3, 64), (9, 80), (24, 128), (1, 6), (2, 24)])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
def test_heads_within_a_merged_product_are_normed_and_rotated(dtype, heads, size, normed, rotated):
    for tokens in (0, 1, 3):
        query_key, whole = qkv(tokens, heads, size, dtype)
        value = whole[:, heads:].clone()
        norms = some(heads, size, dtype=dtype, seed=4) if normed else None
        turns = angles(tokens, size) if rotated else None
        torchs = TORCHS.norm_rotate(query_key.clone(), norms, TORCHS.rotation(turns) if rotated else None, EPS)
        found = OURS.norm_rotate(query_key, norms, OURS.rotation(turns) if rotated else None, EPS)
        assert found.data_ptr() == query_key.data_ptr()
        # A norm one step aside is turned by the rotation into steps of the larger of its two features.
        scale = torchs.abs().amax() if tokens else 1
        difference = (found - torchs).abs().max() if tokens else 0
        assert difference <= 2 * torch.finfo(dtype).eps * scale
        assert torch.equal(whole[:, heads:], value)


@settings(max_examples=examples(15))
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 8))
def test_a_row_has_the_same_bits_in_any_company(rows, pairs, row):
    row %= rows
    x, weight = some(rows, 2 * pairs), some(2 * pairs, seed=1)
    alone = x[row : row + 1].clone()
    assert torch.equal(OURS.rms_norm(x, weight, EPS)[row], OURS.rms_norm(alone, weight, EPS)[0])
    assert torch.equal(OURS.silu_gate(x)[row], OURS.silu_gate(alone)[0])
    heads, turns = some(rows, 3, 2 * pairs), angles(rows, 2 * pairs)
    lonely, turn = heads[row : row + 1].clone(), turns[row : row + 1]
    norms = some(3, 2 * pairs, seed=3)
    assert torch.equal(OURS.norm_rotate(lonely, norms, turn, EPS)[0], OURS.norm_rotate(heads, norms, turns, EPS)[row])


def test_torch_serves_what_the_kernels_are_not_made_for():
    x = some(3, 8, dtype=torch.float64)
    weight = some(8, dtype=torch.float64, seed=1)
    assert torch.equal(OURS.rms_norm(x, weight, EPS), TORCHS.rms_norm(x, weight, EPS))
    assert torch.equal(OURS.silu_gate(x), TORCHS.silu_gate(x))
    wide, ones = some(1, WIDEST + 1), torch.ones(WIDEST + 1, device=DEVICE)
    assert torch.equal(OURS.rms_norm(wide, ones, EPS), TORCHS.rms_norm(wide, ones, EPS))
    gaps = some(3, 2, 8)[..., ::2]
    turns = angles(3, 4)
    found = OURS.norm_rotate(gaps, None, OURS.rotation(turns), EPS)
    assert torch.equal(found, TORCHS.norm_rotate(gaps, None, TORCHS.rotation(turns), EPS))


@pytest.mark.parametrize("name", ["qwen3"])
def test_a_model_gives_the_tokens_of_transformers(name, tmp_path, monkeypatch):
    model = make(name, tmp_path)
    monkeypatch.setattr("engine.worker.runner.select_kernels", lambda *_: OURS)
    config = EngineConfig(str(tmp_path), num_kv_blocks=40, device=DEVICE.type, dtype="float32")
    few = prompts(2, longest=9, seed=2)
    check_against(model, Stepper(ModelRunner(config, SoloGroup(DEVICE))).generate(few, 2), few)


@pytest.mark.parametrize("architecture", [long(80), 90])
def test_all_kernels_compile_for_gpus_without_one(architecture):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.compile_small_kernels", str(architecture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    products = [one for one in found if one["kernel"].startswith("_multiply")]
    assert "_norm_rotate_kernel" in {one["kernel"] for one in found}
    assert len(products) == 7
    for one in products:  # tiles are loaded while others are multiplied; what is left is waited for at the end
        assert one["left"][0] > 0, one


def test_kept_handles_launch_what_triton_would_without_asking_it():
    """What Triton compiles other programs for is told apart: types, what divides by 16, ones, constants, GPUs."""
    cases = defaultdict(list)
    for told in compiled("tests.engine.kernels.kept_launches"):
        cases[told["case"]].append((told["launched"], told["dispatched"]))
    for case, ((first, _), (again, dispatched), (theirs, _)) in cases.items():
        assert first == again == theirs, case
        assert not dispatched, case
    programs = {launched[0][0][4] for launched in cases.values()}
    assert len(programs) == len(cases) - 1  # other values of their kind are no case for another
