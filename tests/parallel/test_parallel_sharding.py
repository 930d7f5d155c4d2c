"""Splitting sizes over ranks: everything lands on exactly one rank, or is refused by name."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.errors import ShardingError
from parallel.sharding import (
    divide,
    even_pieces,
    kv_head_start,
    kv_heads_per_rank,
    padded_vocab,
    qkv_pieces,
    vocab_pieces,
    vocab_range,
)


def test_divide_names_the_dimension_and_sizes_that_work():
    assert divide(12, 4, "heads") == 3
    with pytest.raises(ShardingError, match=r"num_attention_heads = 12 .* 5 ranks; .* 1, 2, 3, 4, 6, 12"):
        divide(12, 5, "num_attention_heads")


def test_a_group_without_ranks_is_refused():
    with pytest.raises(ShardingError, match="at least 1 rank, not 0"):
        divide(12, 0, "heads")


@given(share=st.integers(1, 50), size=st.integers(1, 9))
def test_ranges_cover_a_dimension_without_gap_or_overlap(share: int, size: int):
    pieces = [even_pieces([share * size], rank, size, "rows")[0] for rank in range(size)]
    ranges = [(piece.start, piece.start + piece.size) for piece in pieces]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == share * size
    assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))


@given(vocab=st.integers(1, 2000), size=st.integers(1, 9), multiple=st.sampled_from([1, 8, 64]))
def test_every_token_id_is_on_exactly_one_rank(vocab: int, size: int, multiple: int):
    padded = padded_vocab(vocab, size, multiple)
    assert padded >= vocab > padded - size * multiple
    assert padded % (size * multiple) == 0
    held = [token for rank in range(size) for token in range(*vocab_range(vocab, rank, size, multiple))]
    assert held == list(range(vocab))
    assert sum(vocab_pieces(vocab, rank, size, multiple)[0].size for rank in range(size)) == vocab


def test_kv_heads_are_split_while_they_last_and_then_replicated():
    assert [kv_heads_per_rank(8, size) for size in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]
    assert [kv_head_start(2, rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert [kv_head_start(4, rank, 2) for rank in range(2)] == [0, 2]


@pytest.mark.parametrize("size", [3, 6])
def test_kv_heads_that_fit_neither_way_are_refused_with_sizes_that_work(size: int):
    with pytest.raises(ShardingError, match=r"num_key_value_heads = 4 .* sizes that work: 1, 2, 4, 8, 12, 16"):
        kv_heads_per_rank(4, size)


@given(kv_heads=st.sampled_from([1, 2, 4]), groups=st.integers(1, 4), size=st.sampled_from([1, 2, 4, 8]))
def test_every_query_head_sits_with_the_kv_head_it_attends_to(kv_heads: int, groups: int, size: int):
    heads, head_dim = kv_heads * groups * size, 2
    for rank in range(size):
        q, k, v = qkv_pieces(heads, kv_heads, head_dim, rank, size)
        assert (k.start, k.size) == (v.start, v.size)
        assert (q.offset, k.offset, v.offset) == (0, q.size, q.size + k.size)
        per_kv = heads // kv_heads
        for local, head in enumerate(range(q.start // head_dim, (q.start + q.size) // head_dim)):
            local_kv = local // (q.size // k.size)
            assert head // per_kv == k.start // head_dim + local_kv
