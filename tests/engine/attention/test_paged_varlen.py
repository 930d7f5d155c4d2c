"""FlashAttention-3 and torch's ragged attention: called as their libraries say, refused with reasons in words."""

from __future__ import annotations

import inspect
import math
import sys
import types

import pytest
import torch

from engine.attention import varlen as flash3
from engine.attention import varlen as torch_varlen
from engine.attention.base import StepTensors
from engine.attention.select import select_backend
from engine.attention.varlen import (
    Flash3Attention,
    TorchVarlenAttention,
    reads_pages,
    why_not_flash3,
    why_not_torch_varlen,
)
from engine.errors import ConfigError
from engine.inputs.step_buffers import to_device
from tests.parity.test_attention import CPU, make_step, run, spec

CUDA = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "block_size": 16}


def paged_attention(q, keys, values, starts, lens, tables, scale, window, softcap):
    """Attention of ragged queries over pages, as both libraries define it: causal from the end."""
    out = torch.empty_like(q)
    for row, length in enumerate(lens.tolist()):
        mine = slice(int(starts[row]), int(starts[row + 1]))
        k, v = (cache[tables[row].long()].flatten(0, 1)[:length] for cache in (keys, values))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        count = mine.stop - mine.start
        position, key = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
        assert window[1] == 0
        visible = (key <= position) & ((key >= position - window[0]) | (window[0] < 0))
        scores = torch.einsum("qhd,khd->hqk", q[mine], k) * scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        out[mine] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)
    return out


class FakeFlash3(types.ModuleType):
    """Stands in for flash_attn_interface of flash-attention's folder `hopper`."""

    def __init__(self):
        super().__init__(flash3.MODULE)
        self.__spec__ = types.SimpleNamespace(name=flash3.MODULE)
        self.calls = []

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
        window_size, softcap,
    ):  # fmt: skip
        assert causal
        assert {each.dtype for each in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
        self.calls.append(max_seqlen_q)
        return paged_attention(
            q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap
        )


class FakeVarlen:
    """Stands in for `varlen_attn`, whose arguments it has."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        bound = inspect.signature(torch.nn.attention.varlen.varlen_attn).bind(*args, **kwargs).arguments
        assert bound["cu_seq_k"] is None
        assert bound["enable_gqa"]
        self.calls.append((bound["max_q"], bound["max_k"]))
        return paged_attention(
            bound["query"], bound["key"], bound["value"], bound["cu_seq_q"], bound["seqused_k"], bound["block_table"],
            bound["scale"], bound["window_size"], 0.0,
        )  # fmt: skip


@pytest.fixture
def hopper(monkeypatch):
    """A machine with a Hopper GPU and FlashAttention-3, as far as choosing goes."""
    fake = FakeFlash3()
    monkeypatch.setitem(sys.modules, flash3.MODULE, fake)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    return fake


@pytest.fixture
def varlen(hopper, monkeypatch):

    activated = []
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activated.append, raising=False)
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: None, raising=False)
    backend = TorchVarlenAttention(spec(windows=(0, 6)))
    assert activated == ["FA3"]
    backend._attention = FakeVarlen()
    return backend


with_pages = pytest.mark.skipif(not reads_pages(), reason=f"torch {torch.__version__} has no paged varlen_attn")
STEPS = [([0, 0, 0], [5, 1, 9]), ([0, 8, 20], [5, 3, 1]), ([4, 8, 20], [1, 1, 1])]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(("computed", "lengths"), STEPS)
def test_flash_3_gives_attention_by_its_contract(hopper, computed, lengths, window, softcap):
    backend = Flash3Attention(spec(windows=(window,), softcap=softcap))
    out, expected = run(backend, make_step(computed, lengths), window)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    assert hopper.calls == [max(lengths)]


@with_pages
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("computed", "lengths"), STEPS)
def test_torch_varlen_gives_attention_by_its_contract(varlen, computed, lengths, window):
    out, expected = run(varlen, make_step(computed, lengths), window)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    longest = max(c + n for c, n in zip(computed, lengths, strict=True))
    assert varlen._attention.calls == [(max(lengths), longest)]


def test_a_recorded_decode_step_looks_at_no_layout(hopper):
    step, _ = to_device(make_step([4, 9], [1, 1]), CPU)
    blind = StepTensors(None, *(getattr(step, name) for name in StepTensors.__slots__[1:]))
    backend = Flash3Attention(spec())
    assert backend.supports_graphs
    assert backend.decode_metadata(blind, 40).max_query_len == 1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"device": CPU}, "CUDA device"),
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"head_dim": 512}, "head size 512"),
        ({"batch_invariant": True}, "attention_backend=triton"),
        ({"fp8_cache": True}, "fp8 cache"),
    ],
)
def test_what_neither_serves_is_said_in_words(hopper, values, reason):
    for why_not in (why_not_flash3, why_not_torch_varlen):
        assert reason in why_not(spec(**{**CUDA, **values}))


def test_softcaps_are_not_for_torch_varlen(hopper):
    assert "softcap" in why_not_torch_varlen(spec(**CUDA, softcap=30.0))
    assert why_not_flash3(spec(**CUDA, softcap=30.0)) is None


@with_pages
@pytest.mark.parametrize(("capability", "flash", "varlen"), [((8, 0), "8.0", "8.0"), ((10, 0), "10.0", "FA4")])
def test_each_is_for_some_gpus(hopper, monkeypatch, capability, flash, varlen):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert flash in why_not_flash3(spec(**CUDA))
    assert varlen in why_not_torch_varlen(spec(**CUDA))


@with_pages
def test_an_older_torch_has_no_pages(hopper, monkeypatch):
    assert reads_pages()
    assert why_not_torch_varlen(spec(**CUDA)) is None
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value: None)
    assert "came with 2.12" in why_not_torch_varlen(spec(**CUDA))
    monkeypatch.setattr(torch_varlen, "installed", lambda module: False)
    assert "came with 2.12" in why_not_torch_varlen(spec(**CUDA))


def test_without_its_module_flash_3_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert f"{flash3.MODULE} is not installed" in why_not_flash3(spec(**CUDA))


def test_the_newest_that_works_is_chosen_and_named(hopper, caplog):
    caplog.set_level("INFO")
    assert isinstance(select_backend("flash", spec(**CUDA)), Flash3Attention)
    assert "attention backend: flash (Flash3Attention)" in caplog.text
    assert isinstance(select_backend("auto", spec(**CUDA)), Flash3Attention)


def test_a_flash_that_cannot_be_used_says_so_of_both_versions():
    with pytest.raises(ConfigError, match=r"FlashAttention-2: its pages .* 256; FlashAttention-3: the module"):
        select_backend("flash", spec(**CUDA))
    with pytest.raises(ConfigError, match=r"torch_varlen cannot be used: it needs a CUDA device"):
        select_backend("torch_varlen", spec())
