"""The compiled kernels against torch and against the definition, and their promise: a row's bits know no company."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import native as attention
from engine.attention.base import LayerCache
from engine.attention.native import NativeAttention, why_not_native_attention
from engine.attention.select import select_backend
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.inputs.step_buffers import to_device
from engine.kernels import compiler
from engine.kernels.base import TorchKernels
from engine.kernels.native import SOURCES, NativeKernels
from engine.kernels.select import select_kernels
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.long import examples
from tests.parity import test_attention as paged
from tests.parity.stepping import Sequence, Stepper
from tests.parity.tiny_models import CONFIGS, check_against, make, prompts

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C compiler on this machine"
)
CPU = torch.device("cpu")
BLOCK = 16
DTYPES = [torch.float32, torch.bfloat16]


def spec(**values):
    return paged.spec(**{"block_size": BLOCK, "head_dim": 32, **values})


class Cache:
    """Keys and values of one layer, full of NaN where nothing was written, and steps on scattered blocks."""

    def __init__(self, backend, blocks=64, rows=8):
        s = backend.spec
        self.backend = backend
        self.pair = torch.full((2, blocks, s.block_size, s.num_kv_heads, s.head_dim), torch.nan, dtype=s.dtype)
        free = (np.random.default_rng(1).permutation(blocks - 1) + 1).tolist()
        self.rows = [[free.pop() for _ in range(6 * 8 // rows)] for _ in range(rows)]

    def run(self, sequences, counts, starts, window=0):
        """Attend to `counts` tokens of each sequence (its row and its q | k | v) from `starts` on."""
        s, size = self.backend.spec, self.backend.spec.block_size
        step = paged.make_step([0] * len(counts), counts)
        tables = np.array([self.rows[row] for row, _ in sequences], np.int32)
        where = [np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]
        slots = [tables[i, at // size] * size + at % size for i, at in enumerate(where)]
        step = replace(
            step,
            slot_mapping=np.concatenate(slots).astype(np.int32),
            seq_lens=np.array([at[-1] + 1 for at in where], np.int32),
            num_computed_tokens=np.array(starts, np.int32),
            block_tables=tables,
        )
        qkv = torch.cat([tokens[at] for (_, tokens), at in zip(sequences, where, strict=True)])
        query, key, value = qkv.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)
        self.metadata = self.backend.prepare(to_device(step, CPU)[0])
        out = self.backend.forward(query, key, value, LayerCache(*self.pair), self.metadata, window)
        return out.split(counts)


def definition(s, qkv, window):
    """Causal attention of a whole sequence in fp64."""
    query, key, value = (x.double() for x in qkv.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1))
    key, value = (x.repeat_interleave(s.num_heads // s.num_kv_heads, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * s.scale
    if s.softcap:
        scores = torch.tanh(scores / s.softcap) * s.softcap
    ahead = torch.arange(len(qkv))[None] - torch.arange(len(qkv))[:, None]
    hidden = (ahead > 0) | (ahead <= -window) if window else ahead > 0
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def tokens(s, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, s.num_heads + 2 * s.num_kv_heads, s.head_dim, generator=generator).to(s.dtype)


@needs_compiler
@settings(max_examples=examples(60))
@given(
    dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from([16, 48, 64, 128]),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (5, 1), (16, 2)]),
    block=st.sampled_from([16, 32]),
    window=st.sampled_from([0, 1, 9, 40]),
    softcap=st.sampled_from([0.0, 5.0]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    cuts=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_attention_is_the_definition_in_any_chunks(dtype, head_dim, heads, block, window, softcap, lengths, cuts):
    s = spec(
        dtype=dtype, head_dim=head_dim, num_heads=heads[0], num_kv_heads=heads[1], block_size=block, softcap=softcap
    )
    cache = Cache(NativeAttention.create(s))
    sequences = [(row, tokens(s, length, row)) for row, length in enumerate(lengths)]
    first = [max(1, round(length * cut)) for length, cut in zip(lengths, cuts, strict=False)]
    begun = cache.run(sequences, first, [0] * len(first), window)
    rest = [length - done for length, done in zip(lengths, first, strict=True)]
    going = [i for i, left in enumerate(rest) if left]
    ends = {}
    if going:
        ended = cache.run([sequences[i] for i in going], [rest[i] for i in going], [first[i] for i in going], window)
        ends = dict(zip(going, ended, strict=True))
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for i, (_, qkv) in enumerate(sequences):
        found = torch.cat((begun[i], ends[i])) if i in ends else begun[i]
        torch.testing.assert_close(found.double(), definition(s, qkv, window), rtol=tolerance, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_attention_has_the_same_bits_in_any_company_and_chunks(dtype, heads, window):
    s = spec(dtype=dtype, head_dim=64, num_heads=heads[0], num_kv_heads=heads[1])
    others = [(row, tokens(s, 80, row)) for row in (1, 2, 3)]
    mine = (0, tokens(s, 80, 0))
    whole = Cache(NativeAttention.create(s)).run([mine], [80], [0], window)[0]
    together = Cache(NativeAttention.create(s)).run([*others, mine], [7, 80, 33, 80], [0] * 4, window)[3]
    assert torch.equal(together, whole)
    cache = Cache(NativeAttention.create(s))
    for start, count in ((0, 1), (1, 30), (31, 16), (47, 32), (79, 1)):
        assert torch.equal(cache.run([mine], [count], [start], window)[0], whole[start : start + count])


@needs_compiler
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences_are_the_definition_with_the_same_bits_in_any_chunks(dtype, window):
    """Keys are taken in pieces, whose results are put together: of one query more than two."""
    s = spec(dtype=dtype, head_dim=64, num_heads=6, num_kv_heads=2, block_size=32)
    qkv = tokens(s, 1300, 0)
    qkv[:, s.num_heads : s.num_heads + s.num_kv_heads] *= torch.linspace(1, 3, 1300)[:, None, None]
    whole = Cache(NativeAttention.create(s), rows=1).run([(0, qkv)], [1300], [0], window)[0]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(whole.double(), definition(s, qkv, window), rtol=tolerance, atol=tolerance)
    # Five threads and two KV heads: of few queries each piece is another thread's.
    cache = Cache(NativeAttention(s, NativeAttention.create(s)._library, 5), rows=1)
    for start, count in ((0, 500), (500, 33), (533, 600), (1133, 1), (1134, 2), (1136, 164)):
        assert torch.equal(cache.run([(0, qkv)], [count], [start], window)[0], whole[start : start + count])
        assert (cache.metadata.parts is not None) == (count == 2)


@needs_compiler
@pytest.mark.parametrize("isa", compiler.isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_that_has_less_attends_as_well(dtype, isa, monkeypatch):
    """The definition, and the same bits in any chunks, for each of the CPUs that this one can be taken for."""
    monkeypatch.setenv(compiler.ISA_VARIABLE, isa)
    s = spec(dtype=dtype, head_dim=64, num_heads=6, num_kv_heads=2, softcap=5.0)
    qkv = tokens(s, 90, 0)
    whole = Cache(NativeAttention.create(s)).run([(0, qkv)], [90], [0], 40)[0]
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(whole.double(), definition(s, qkv, 40), rtol=tolerance, atol=tolerance)
    cache = Cache(NativeAttention.create(s))
    for start, count in ((0, 1), (1, 50), (51, 39)):
        assert torch.equal(cache.run([(0, qkv)], [count], [start], 40)[0], whole[start : start + count])


@needs_compiler
def test_a_matrix_unit_that_may_not_be_used_is_done_without(monkeypatch):
    made = attention.native_library

    def forbidden(*sizes, matrix_unit=True):
        library = made(*sizes, matrix_unit=matrix_unit)
        if matrix_unit:
            monkeypatch.setattr(library, "may_attend", lambda: 0)
        return library

    monkeypatch.setattr(attention, "native_library", forbidden)
    s = spec(dtype=torch.bfloat16, head_dim=64, num_heads=6, num_kv_heads=2)
    backend = NativeAttention.create(s)
    assert backend._library.best_rows() == 24, "rows of vectors, not of tiles"
    qkv = tokens(s, 90, 0)
    found = Cache(backend).run([(0, qkv)], [90], [0])[0]
    torch.testing.assert_close(found.double(), definition(s, qkv, 0), rtol=1e-2, atol=1e-2)


def test_a_cpu_that_this_one_is_not_is_refused_by_name(monkeypatch):
    monkeypatch.setenv(compiler.ISA_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match=r"SQUADRON_CPU_ISA=avx1024.*use native") as refused:
        compiler.chosen_isa()
    assert refused.value.flag == compiler.ISA_VARIABLE


@needs_compiler
def test_a_poisoned_key_far_back_is_seen_by_all_that_look_so_far():
    s = spec(head_dim=64, num_heads=2, num_kv_heads=2, block_size=32)
    poisoned = tokens(s, 1200, 0)
    poisoned[7] = torch.nan
    whole = Cache(NativeAttention.create(s), rows=1).run([(0, poisoned)], [1200], [0], 600)[0]
    hit = whole.isnan().flatten(1).all(1)
    assert hit.nonzero().flatten().tolist() == list(range(7, 607))
    assert whole[~hit].isfinite().all()


@needs_compiler
def test_a_nan_stays_in_its_sequence():
    s = spec(dtype=torch.bfloat16)
    poisoned, sound = tokens(s, 20, 0), tokens(s, 20, 1)
    poisoned[5] = torch.nan
    out = Cache(NativeAttention.create(s)).run([(0, poisoned), (1, sound)], [20, 20], [0, 0])
    assert out[0][5:].isnan().all()
    assert out[1].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_nothing_before_a_poisoned_token_or_beyond_its_window_sees_it(heads, poison, window):
    s = spec(num_heads=heads[0], num_kv_heads=heads[1])
    poisoned = tokens(s, 40, 0)
    poisoned[7] = poison
    whole = Cache(NativeAttention.create(s)).run([(0, poisoned)], [40], [0], window)[0]
    hit = ~whole.isfinite().flatten(1).all(1)
    assert hit.nonzero().flatten().tolist() == list(range(7, 7 + window if window else 40))
    cache = Cache(NativeAttention.create(s))
    alone = torch.cat([cache.run([(0, poisoned)], [1], [at], window)[0] for at in range(40)])
    assert torch.equal(alone[~hit], whole[~hit])


@needs_compiler
def test_infinite_scores_are_capped_like_any_other():
    s = spec(softcap=5.0)
    qkv = tokens(s, 40, 0).abs()
    qkv[3, s.num_heads : s.num_heads + s.num_kv_heads] = -3e38  # keys: their scores are beyond what fp32 holds
    out = Cache(NativeAttention.create(s)).run([(0, qkv * 2)], [40], [0])[0]
    torch.testing.assert_close(out.double(), definition(s, qkv * 2, 0), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_small_step_stays_in_its_thread_and_threads_change_no_bit():
    s = spec(num_heads=8, num_kv_heads=4)
    library = NativeAttention.create(s)._library
    one, three = (NativeAttention(s, library, threads) for threads in (1, 3))
    qkv = [(row, tokens(s, 90, row)) for row in range(8)]
    assert torch.equal(
        torch.cat(Cache(one).run(qkv, [90] * 8, [0] * 8)), torch.cat(Cache(three).run(qkv, [90] * 8, [0] * 8))
    )
    used = [three.prepare(to_device(paged.make_step([0], [n]), CPU)[0]).step.threads for n in (1, 400)]
    assert used == [1, 3]


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request):
    found = select_kernels(64, request.param, CPU)
    if not isinstance(found, NativeKernels):
        pytest.skip("no C compiler on this machine")
    return found, request.param


def close(found, expected, dtype):
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("outs", "ins"), [(1, 2), (64, 64), (199, 96), (100, 770), (192, 2050)])
def test_products_are_torchs(kernels, outs, ins):
    native, dtype = kernels
    weight, bias = torch.randn(outs, ins).to(dtype), torch.randn(outs).to(dtype)
    method = native.linear(weight)
    if method is None:
        pytest.skip("products of this dtype are left to oneDNN on this machine")
    for rows in (0, 1, 2, 5, 6, 13, 256, 257, 600):
        x = torch.randn(rows, ins).to(dtype)
        for offsets in (None, bias):
            close(method.apply(x, offsets) / ins**0.5, F.linear(x, weight, offsets) / ins**0.5, dtype)


def test_a_product_has_the_same_bits_in_any_company(kernels):
    native, dtype = kernels
    method = native.linear(torch.randn(300, 2048).to(dtype))
    if method is None:
        pytest.skip("products of this dtype are left to oneDNN on this machine")
    x = torch.randn(600, 2048).to(dtype)
    together = method.apply(x, None)
    for rows in (1, 2, 3, 4, 5, 6, 7, 64, 100, 257, 300):
        assert torch.equal(method.apply(x[299 : 299 + rows], None), together[299 : 299 + rows])
    strided = torch.cat((x, x), dim=1)[:, :2048]
    assert torch.equal(method.apply(strided, None), together)


def test_a_weight_with_gaps_is_packed_as_what_it_shows(kernels):
    native, dtype = kernels
    weight = torch.randn(2048, 1024).to(dtype)
    method = native.linear(weight.t())
    if method is None:
        pytest.skip("products of this dtype are left to oneDNN on this machine")
    x = torch.randn(3, 2048).to(dtype)
    assert torch.equal(method.apply(x, None), native.linear(weight.t().contiguous()).apply(x, None))


def test_a_product_refuses_what_it_would_read_past_the_end_of(kernels):
    native, dtype = kernels
    method = native.linear(torch.randn(64, 64).to(dtype))
    if method is None:
        pytest.skip("products of this dtype are left to oneDNN on this machine")
    for x in (torch.randn(3, 62).to(dtype), torch.randn(3, 64).half(), torch.randn(64, 3).to(dtype).t()):
        with pytest.raises(ValueError, match="64"):
            method.apply(x, None)


def test_a_nan_or_infinity_stays_in_its_row_of_a_product(kernels):
    native, dtype = kernels
    method = native.linear(torch.randn(100, 64).abs().to(dtype))
    if method is None:
        pytest.skip("products of this dtype are left to oneDNN on this machine")
    x = torch.randn(9, 64).to(dtype)
    x[4, 9], x[6, 63] = torch.nan, torch.inf
    out = method.apply(x, None)
    assert out[4].isnan().all()
    assert (out[6] == torch.inf).all()
    assert out[[0, 1, 2, 3, 5, 7, 8]].isfinite().all()


def test_sums_are_rounded_to_the_nearest_and_even(kernels):
    native, dtype = kernels
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 64, 1024)).to(torch.int32).view(torch.float32)  # of every kind
    x, residual = bits.to(dtype)
    residual[0] = (x[0].float() / 256).to(dtype)  # so that sums lie between two values, and half-way
    expected = (x.float() + residual.float()).to(dtype)
    native.add_rms_norm(residual, x, torch.ones(1024, dtype=dtype), 1e-5)
    assert torch.equal(residual.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(residual.isnan(), expected.isnan())


def test_the_exponential_is_good_to_a_few_units_in_the_last_place():
    native = select_kernels(64, torch.float32, CPU)
    if not isinstance(native, NativeKernels):
        pytest.skip("no C compiler on this machine")
    gate = torch.linspace(-86.9, 80, 160000).view(10, -1)
    found = native.silu_gate(torch.cat((gate, torch.ones_like(gate)), 1)).double()
    expected = gate.double() / (1 + (-gate.double()).exp())
    assert ((found - expected).abs() <= 4e-7 * expected.abs()).all()


def test_norms_of_other_layouts_and_dtypes_are_left_to_torch(kernels):
    native, dtype = kernels
    wide, weight = torch.randn(30, 128).to(dtype), torch.randn(64).to(dtype)
    close(native.rms_norm(wide[:, :64], weight, 1e-5), TorchKernels().rms_norm(wide[:, :64], weight, 1e-5), dtype)
    double = torch.randn(30, 64).double()
    found = native.rms_norm(double, weight.double(), 1e-5)
    torch.testing.assert_close(found, TorchKernels().rms_norm(double, weight.double(), 1e-5))


def test_products_of_another_dtype_or_an_odd_width_are_left_to_others(kernels):
    native, dtype = kernels
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    assert native.linear(torch.randn(64, 64).to(other)) is None
    assert native.linear(torch.randn(64, 63).bfloat16()) is None


@pytest.mark.parametrize("size", [48, 768, 40])  # 40 is left to torch
def test_norms_are_torchs(kernels, size):
    native, dtype = kernels
    x, residual, weight = (torch.randn(30, size).to(dtype) for _ in range(3))
    weight = weight[0]
    close(native.rms_norm(x, weight, 1e-5), TorchKernels().rms_norm(x, weight, 1e-5), dtype)
    expected = residual.clone()
    normed = TorchKernels().add_rms_norm(expected, x, weight, 1e-5)
    close(native.add_rms_norm(residual, x, weight, 1e-5), normed, dtype)
    close(residual, expected, dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_heads_are_normed_and_rotated_as_by_torch(kernels, normed, rotated):
    native, dtype = kernels
    merged = torch.randn(40, 9, 64).to(dtype)
    norms = torch.randn(6, 64).to(dtype) if normed else None
    angles = torch.rand(40, 32) * 6
    table = torch.stack((angles.cos(), angles.sin()), 1)
    before, plain = merged.clone(), TorchKernels()
    wide = None if norms is None else norms.float()  # rounded once, as here: torch in bf16 rounds between the steps
    expected = plain.norm_rotate(before[:, :6].float(), wide, plain.rotation(table) if rotated else None, 1e-5)
    found = native.norm_rotate(merged[:, :6], norms, native.rotation(table) if rotated else None, 1e-5)
    close(found, expected, dtype)
    assert torch.equal(merged[:, 6:], before[:, 6:])


def test_heads_of_another_layout_or_dtype_are_refused(kernels):
    native, dtype = kernels
    for heads in (
        torch.randn(5, 64, 3).to(dtype).mT,
        torch.randn(5, 6, 64).to(dtype)[:, ::2],
        torch.randn(5, 3, 64).half(),
    ):
        with pytest.raises(ValueError, match="side by side"):
            native.norm_rotate(heads, None, None, 1e-5)
    if dtype is torch.float32:
        s = spec(dtype=dtype)
        with pytest.raises(ValueError, match="side by side"):
            Cache(NativeAttention.create(s)).run([(0, tokens(s, 5, 0).half())], [5], [0])


def test_another_cpu_is_another_library(monkeypatch):
    here = compiler._fingerprint(sys.executable, (), {})
    monkeypatch.setattr(compiler, "_processor", lambda: ["flags: fpu avx2"])
    assert compiler._fingerprint(sys.executable, (), {}) != here


@pytest.mark.parametrize("size", [32, 2048, 20])
def test_gates_are_torchs(kernels, size):
    native, dtype = kernels
    x = torch.randn(30, 2 * size).to(dtype) * 20
    x[0, :2] = torch.tensor([-200.0, 200.0])
    x[1, 0] = torch.nan
    found = native.silu_gate(x)
    close(found[2:], TorchKernels().silu_gate(x)[2:], dtype)
    close(found[0], TorchKernels().silu_gate(x)[0], dtype)
    assert found[1, 0].isnan()


def test_rows_have_the_same_bits_alone_and_together(kernels):
    native, dtype = kernels
    x, weight = torch.randn(700, 768).to(dtype), torch.randn(768).to(dtype)
    assert torch.equal(native.rms_norm(x, weight, 1e-5)[500:501], native.rms_norm(x[500:501], weight, 1e-5))
    assert torch.equal(native.silu_gate(x)[3:5], native.silu_gate(x[3:5]))


@needs_compiler
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_gives_the_tokens_of_transformers(name, tmp_path):
    model = make(name, tmp_path)
    runner = ModelRunner(EngineConfig(str(tmp_path), num_kv_blocks=40, block_size=16, device="cpu"), SoloGroup())
    ragged = prompts(6, seed=2)
    check_against(model, Stepper(runner).generate(ragged, 6), ragged)


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3", "stablelm", "stablelm_parallel", "cohere", "cohere2"])
def test_a_model_gives_the_same_logits_in_any_company_and_chunks(name, tmp_path):
    make(name, tmp_path)
    runner = ModelRunner(EngineConfig(str(tmp_path), num_kv_blocks=60, block_size=16, device="cpu"), SoloGroup())
    assert runner.attention_backend == "native"
    ragged = prompts(7, longest=60, seed=3)
    together = Stepper(runner).generate(ragged, 5)
    for sequence, prompt in zip(together, ragged, strict=True):
        alone = Stepper(runner).generate([prompt], 5)[0]
        assert alone.tokens == sequence.tokens
        assert torch.equal(torch.stack(alone.logits), torch.stack(sequence.logits))
        chunked, again = Stepper(runner), Sequence(list(prompt))
        while again.computed < len(prompt):
            chunked.step({0: min(11, len(prompt) - again.computed)}, [again])
        assert torch.equal(again.logits[0], sequence.logits[0])


def test_how_products_are_computed_is_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    make("llama", tmp_path)
    ModelRunner(EngineConfig(str(tmp_path), num_kv_blocks=40, block_size=16, device="cpu"), SoloGroup())
    assert re.search(r"products: \d+ by (Native|Packed|Plain)Linear", caplog.text)
    assert re.search(r"kernels: (compiled for this CPU|torch's operations)", caplog.text)


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list a process's libraries")
def test_the_kernels_share_torchs_threads_instead_of_bringing_a_second_pool():
    program = (
        "import re, torch, pathlib\n"
        "from engine.kernels.native import native_library\n"
        "assert native_library(16, torch.float32)\n"
        "torch.zeros(1 << 20).add_(1)\n"
        "print(*set(re.findall(r'/\\S*/lib[gi]?omp\\S*', pathlib.Path('/proc/self/maps').read_text())))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.split()) == 1, f"OpenMP runtimes that compete for the cores: {done.stdout}"


@needs_compiler
def test_a_large_step_is_taken_in_parts_and_gives_the_same_logits(tmp_path, monkeypatch):
    make("llama", tmp_path)
    runner = ModelRunner(EngineConfig(str(tmp_path), num_kv_blocks=60, block_size=16, device="cpu"), SoloGroup())
    ragged = prompts(7, longest=60, seed=3)
    whole = Stepper(runner).generate(ragged, 3)
    monkeypatch.setattr("engine.worker.forward.PART_TOKENS", 50)
    parts = Stepper(runner).generate(ragged, 3)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.fixture
def no_cache(monkeypatch):
    monkeypatch.setattr(compiler, "_cache_folder", lambda: None)


def test_without_a_compiler_torch_serves(monkeypatch, caplog):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    caplog.set_level("INFO")
    assert select_backend("auto", spec()).name == "reference"
    assert type(select_kernels(64, torch.float32, CPU)) is TorchKernels
    assert "no C compiler" in caplog.text
    with pytest.raises(ConfigError, match="cannot be compiled") as refused:
        select_backend("native", spec())
    assert refused.value.flag == "attention_backend"


def test_a_compiler_that_fails_is_quoted_and_torch_serves(monkeypatch, caplog, tmp_path, no_cache):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'libgomp is missing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: str(broken))
    assert select_backend("auto", spec()).name == "reference"
    assert "libgomp is missing" in caplog.text


@needs_compiler
def test_without_a_cache_folder_a_library_is_built_for_this_process_alone(no_cache):
    assert select_backend("auto", spec()).name == "native"


@needs_compiler
def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "_cache_folder", lambda: tmp_path)
    assert NativeAttention.create(spec()) is not None
    built = [(path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()]
    assert NativeAttention.create(spec()) is not None
    assert [(path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()] == built
    assert len(built) == 1


@needs_compiler
def test_a_library_that_does_not_load_is_built_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiler, "_fingerprint", lambda *_: "named")
    library = tmp_path / "named.so"
    library.write_bytes(b"cut short")
    library.chmod(0o700)
    assert NativeAttention.create(spec(head_dim=16)) is not None
    assert library.stat().st_size > 10000


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "_cache_folder", lambda: tmp_path)
    assert NativeAttention.create(spec(head_dim=16)) is not None
    (library,) = tmp_path.iterdir()
    library.chmod(0o777)
    before = library.stat().st_ino
    assert NativeAttention.create(spec(head_dim=16)) is not None
    assert library.stat().st_ino != before
    assert library.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_a_cache_folder_that_others_can_write_to_is_not_used(monkeypatch, tmp_path, caplog, mode):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = compiler._cache_folder()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    assert compiler._cache_folder() is None
    assert "can be written by others" in caplog.text


@needs_compiler
def test_a_home_that_libraries_cannot_be_run_from_is_passed_over(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(compiler, "_cache_folder", lambda: tmp_path)
    load = compiler.ctypes.CDLL

    def refuse(path):
        if path.startswith(str(tmp_path)):
            raise OSError("failed to map segment: Operation not permitted")
        return load(path)

    monkeypatch.setattr(compiler.ctypes, "CDLL", refuse)
    assert NativeAttention.create(spec(head_dim=16)) is not None
    assert "Operation not permitted" in caplog.text


def fake_compiler(monkeypatch, tmp_path, lines):
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\n" + lines)
    fake.chmod(0o755)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: str(fake))


def test_a_compiler_that_hangs_is_ended_with_all_it_started(monkeypatch, tmp_path, caplog, no_cache):
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    fake_compiler(monkeypatch, tmp_path, f"sleep 1000 > {held} &\nwait\n")
    monkeypatch.setattr(compiler, "TIMEOUT", 1.0)
    assert compiler.load_library(SOURCES, {}) is None
    assert "timed out" in caplog.text
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # nobody is left who could write
    os.close(reader)


def test_complaints_in_any_encoding_are_quoted(monkeypatch, tmp_path, caplog, no_cache):
    fake_compiler(monkeypatch, tmp_path, "printf 'Datei fehlt f\\374r libgomp' >&2; exit 1\n")
    assert compiler.load_library(SOURCES, {}) is None
    assert "libgomp" in caplog.text


@needs_compiler
def test_processes_that_build_at_once_all_get_the_library(tmp_path):
    program = (
        "from engine.kernels.native import SOURCES, load_library;"
        "assert load_library(SOURCES, {'HEAD_DIM': 16, 'BLOCK': 16, 'BF16': 0, 'LATENT': 0}).multiplies() in (0, 1)"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert [path.suffix for path in (tmp_path / ".cache/squadron/kernels").iterdir()] == [".so"]


def test_which_kernels_serve_and_why_is_logged(caplog):
    caplog.set_level("INFO")
    select_kernels(64, torch.float16, CPU)
    assert "kernels: torch's operations; the compiled ones cannot be used" in caplog.text
    assert "not float16" in caplog.text


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"block_size": 8}, "block_size 8"),
        ({"head_dim": 24}, "head size 24"),
        ({"dtype": torch.float16}, "not float16"),
        ({"device": torch.device("cuda")}, "not for cuda"),
    ],
)
def test_what_cannot_be_compiled_is_told(values, reason):
    assert reason in why_not_native_attention(spec(**values))
    with pytest.raises(ConfigError, match=reason):
        select_backend("native", spec(**values))
