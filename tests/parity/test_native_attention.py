"""Attention compiled for this CPU against its definition; a token's bits know no company and no chunks."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import native as attention
from engine.attention.base import LayerCache
from engine.attention.native import NativeAttention
from engine.inputs.step_buffers import to_device
from engine.kernels import compiler
from parallel import c_library
from tests.long import examples
from tests.parity import test_attention as paged
from tests.parity.step_layouts import step_on

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, c_library.COMPILERS)), reason="no C compiler on this machine"
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
        s = self.backend.spec
        step = step_on([self.rows[row] for row, _ in sequences], counts, starts, self.backend.spec.block_size)
        ranges = zip(sequences, starts, counts, strict=True)
        qkv = torch.cat([tokens[start : start + count] for (_, tokens), start, count in ranges])
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
