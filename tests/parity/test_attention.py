import math
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.demo import demo_model_path
from engine.attention import reference as planning
from engine.attention.base import AttentionSpec, LayerCache
from engine.attention.reference import ReferenceAttention
from engine.attention.select import select_backend
from engine.attention.varlen import FlashAttention, why_not_flash
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.inputs.step_buffers import to_device
from engine.loader.checkpoint import open_model
from engine.resolve import check_model, resolve
from tests.long import examples
from tests.parity.step_layouts import BLOCK, NUM_BLOCKS, make_step

CPU = torch.device("cpu")


def spec(**values):
    known = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "scale": 0.3,
        "windows": (0,),
        "softcap": 0.0,
        "block_size": BLOCK,
        "dtype": torch.float32,
        "device": CPU,
    }
    return AttentionSpec(**{**known, **values})


def naive(spec, step, query, key_cache, value_cache, window):
    """Attention token by token in fp64, straight from the definition."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = spec.num_heads // spec.num_kv_heads
    for row in range(step.num_reqs):
        table = step.block_tables[row]
        for token in range(step.query_start_loc[row], step.query_start_loc[row + 1]):
            position = step.positions[token]
            low = max(0, position - window + 1) if window else 0
            slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(low, position + 1)]
            keys, values = (cache.flatten(0, 1)[slots].double() for cache in (key_cache, value_cache))
            for head in range(spec.num_heads):
                scores = keys[:, head // group] @ query[token, head].double() * spec.scale
                if spec.softcap:
                    scores = torch.tanh(scores / spec.softcap) * spec.softcap
                out[token, head] = scores.softmax(0) @ values[:, head // group]
    return out


def run(backend, step, window, seed=0):
    """Return the backend's result and the naive one for random queries, keys, values and cached content."""
    generator = torch.Generator().manual_seed(seed)
    s = backend.spec
    caches = [torch.randn(NUM_BLOCKS, BLOCK, s.num_kv_heads, s.head_dim, generator=generator) for _ in range(2)]
    merged = torch.randn(step.num_tokens, s.num_heads + 2 * s.num_kv_heads, s.head_dim, generator=generator)
    query, key, value = merged.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)
    tensors, _ = to_device(step, CPU)
    out = backend.forward(query, key, value, LayerCache(*caches), backend.prepare(tensors), window)
    return out, naive(s, step, query, *caches, window)


sequence_shapes = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20)) | st.tuples(st.just(0), st.integers(1, 20))
    | st.tuples(st.integers(0, 40), st.just(1)), min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=examples(60))
@given(sequence_shapes, st.sampled_from([0, 1, 3, 7, 16]), st.sampled_from([0.0, 5.0]), st.booleans())
def test_reference_matches_the_definition(shapes, window, softcap, small_tiles):
    backend = ReferenceAttention(spec(windows=(window,), softcap=softcap))
    if small_tiles:  # so that long queries and large groups are cut into several
        backend._paged_limits = planning.Limits(40, 150)
        backend._direct_limits = planning.Limits(24, 10_000)
    step = make_step([c for c, _ in shapes], [n for _, n in shapes])
    out, expected = run(backend, step, window)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)


def test_layers_may_have_different_windows():
    backend = ReferenceAttention(spec(windows=(0, 5)))
    step = make_step([0, 9, 20], [12, 6, 1])
    for window in (0, 5):
        out, expected = run(backend, step, window)
        torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)


def test_heads_need_not_be_grouped():
    backend = ReferenceAttention(spec(num_heads=2))
    out, expected = run(backend, make_step([0, 9, 20], [12, 6, 1]), 0)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)


def test_bfloat16_is_accumulated_in_fp32():
    backend = ReferenceAttention(spec(dtype=torch.bfloat16, num_heads=2))
    step = make_step([300], [1])
    caches = torch.zeros(2, NUM_BLOCKS, BLOCK, 2, 8, dtype=torch.bfloat16)
    caches[1] = 1.0  # all weights equal: the sum of 301 of them must not stall at bfloat16's 256
    tensors, _ = to_device(step, CPU)
    zeros = torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    out = backend.forward(zeros, zeros, zeros + 1, LayerCache(*caches), backend.prepare(tensors), 0)
    torch.testing.assert_close(out.float(), torch.ones(1, 2, 8), rtol=0.01, atol=0)


def test_decodes_of_many_sequences_take_few_tiles():
    layout = to_device(make_step(list(range(20, 50)), [1] * 30), CPU)[0].layout
    limits = planning.Limits(10_000, 1 << 20)
    direct, paged = planning.plan(layout, 0, BLOCK, limits, limits)
    assert not direct
    assert len(paged) <= 3
    assert sum(tile.rows.size for tile in paged) == 30


def test_padding_of_a_tile_is_bounded():
    layout = to_device(make_step([400, 10, 10, 10], [1] * 4), CPU)[0].layout
    limits = planning.Limits(10_000, 1 << 20)
    _, paged = planning.plan(layout, 0, BLOCK, limits, limits)
    assert sorted(tile.rows.size for tile in paged) == [1, 3]


def test_a_windowed_decode_reads_only_the_window():
    layout = to_device(make_step([400], [1]), CPU)[0].layout
    limits = planning.Limits(10_000, 1 << 20)
    _, paged = planning.plan(layout, 9, BLOCK, limits, limits)
    assert len(paged[0].blocks) <= math.ceil(9 / BLOCK) + 1


class FakeFlash(types.ModuleType):
    """Stands in for the flash_attn package: records the arguments, computes plainly what they say."""

    def __init__(self):
        super().__init__("flash_attn")
        self.calls = []

    def flash_attn_varlen_func(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **rest):
        self.calls.append(("varlen", {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **rest}))
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(cu_seqlens_k.diff().max())
        out = torch.empty_like(q)
        table = rest.pop("block_table")
        for row in range(len(cu_seqlens_q) - 1):
            queries = slice(cu_seqlens_q[row], cu_seqlens_q[row + 1])
            if table is None:
                keys = slice(cu_seqlens_k[row], cu_seqlens_k[row + 1])
                pair = k[keys], v[keys]
            else:
                length = int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
                pair = [cache[table[row].long()].flatten(0, 1)[:length] for cache in (k, v)]
            out[queries] = self._attend(q[queries], *pair, **rest)
        return out

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, *, cache_seqlens, block_table, **rest):
        self.calls.append(("kvcache", {"cache_seqlens": cache_seqlens, "block_table": block_table, **rest}))
        assert cache_seqlens.dtype == block_table.dtype == torch.int32
        assert q.shape[1] == 1
        out = torch.empty_like(q)
        for row, length in enumerate(cache_seqlens.tolist()):
            pair = [cache[block_table[row].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache)]
            out[row] = self._attend(q[row], *pair, **rest)
        return out

    def _attend(self, q, k, v, *, softmax_scale, causal, window_size, softcap):
        assert causal
        position = torch.arange(len(k) - len(q), len(k))[:, None]  # aligned to the end, as flash-attn 2.1 on
        key = torch.arange(len(k))[None]
        visible = key <= position
        if window_size != (-1, -1):
            assert window_size[1] == 0
            visible &= key >= position - window_size[0]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)


@pytest.fixture
def flash(monkeypatch):
    fake = FakeFlash()
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", fake)
    return fake


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(
    ("computed", "lengths", "kernel", "paged"),
    [
        ([0, 0, 0], [5, 1, 9], "varlen", False),
        ([0, 8, 20], [5, 3, 1], "varlen", True),
        ([4, 8, 20], [1, 1, 1], "kvcache", True),
        ([0, 3], [1, 1], "kvcache", True),
    ],
)
def test_flash_is_called_with_the_right_arguments(flash, computed, lengths, kernel, paged, window, softcap):
    backend = FlashAttention(spec(windows=(window,), softcap=softcap))
    step = make_step(computed, lengths)
    out, expected = run(backend, step, window)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    name, arguments = flash.calls[0]
    assert name == kernel
    assert (arguments["block_table"] is not None) == paged
    if name == "varlen":
        assert arguments["cu_seqlens_q"].tolist() == step.query_start_loc.tolist()
        assert arguments["cu_seqlens_k"].tolist() == [0, *np.cumsum(step.seq_lens)]


def test_flash_stores_new_keys_before_it_attends(flash):
    backend = FlashAttention(spec())
    step = make_step([0], [6])
    caches = torch.zeros(2, NUM_BLOCKS, BLOCK, 2, 8)
    key = torch.randn(6, 2, 8)
    tensors, _ = to_device(step, CPU)
    backend.forward(torch.zeros(6, 6, 8), key, key * 2, LayerCache(*caches), backend.prepare(tensors), 0)
    torch.testing.assert_close(caches[0].flatten(0, 1)[step.slot_mapping], key)
    torch.testing.assert_close(caches[1].flatten(0, 1)[step.slot_mapping], key * 2)


CUDA_SPEC = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "block_size": 256}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"device": CPU}, "CUDA"),
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"head_dim": 512}, "head size 512"),
        ({"block_size": 16}, "block_size to 256"),
    ],
)
def test_flash_says_why_it_cannot_be_used(flash, values, reason):
    assert reason in why_not_flash(spec(**{**CUDA_SPEC, **values}))


def test_flash_needs_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in why_not_flash(spec(**CUDA_SPEC))


def test_auto_takes_what_works_and_a_forced_backend_is_refused_by_name(caplog):
    caplog.set_level("INFO")
    assert select_backend("auto", spec()).name == "reference"
    assert "flash cannot be used: it needs a CUDA device" in caplog.text
    with pytest.raises(ConfigError, match="needs a CUDA device") as refused:
        select_backend("flash", spec())
    assert refused.value.flag == "attention_backend"


@pytest.mark.parametrize(
    ("settings", "flag", "message"),
    [
        ({"attention_backend": "flash"}, "attention_backend", r"flash cannot be used: it needs.*use .*=auto"),
        ({"attention_backend": "torch_varlen"}, "attention_backend", r"torch_varlen cannot be used.*=auto"),
        ({"attention_backend": "native", "kv_cache_dtype": "fp8"}, "kv_cache_dtype", r"use kv_cache_dtype=auto"),
        ({"attention_backend": "reference", "batch_invariant": True}, "batch_invariant", r"attention_backend=auto"),
        ({"cudagraph_capture_sizes": (1, 8)}, "cudagraph_capture_sizes", r"device=cpu does not have; leave it out"),
    ],
)
def test_what_a_cpu_does_not_have_is_told_before_anything_is_loaded(settings, flag, message):
    model = open_model(str(demo_model_path())).config
    with pytest.raises(ConfigError, match=message) as refused:
        check_model(resolve(EngineConfig(str(demo_model_path()), device="cpu", **settings), model), model)
    assert refused.value.flag == flag
