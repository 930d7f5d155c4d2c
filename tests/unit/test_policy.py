"""The routing policy: load and cached prefixes weighed, hot prefixes spread, the index never trusted too far."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.policy import Candidate, PolicyConfig, PrefixIndex, cost, rank
from engine.errors import ConfigError


def first(candidates: list[Candidate], prompt: int = 1000, seed: int = 0) -> str:
    return rank(candidates, prompt, Random(seed))[0]


def test_idle_replica_is_preferred_to_a_loaded_one():
    assert {first([Candidate("a", 5000, 10), Candidate("b")], seed=s) for s in range(20)} == {"b"}


def test_cached_prefix_is_followed():
    replicas = [Candidate("a"), Candidate("b", overlap_tokens=800), Candidate("c"), Candidate("d")]
    assert {first(replicas, seed=s) for s in range(20)} == {"b"}


def test_hot_prefix_spreads_once_its_home_is_loaded():
    """Each request adds its load where it goes: with one prefix for all, all replicas come to work."""
    load: Counter[str] = Counter()
    for i in range(400):
        replicas = [
            Candidate(name, 0, load[name], overlap_tokens=2000 if name == "a" else 0) for name in ("a", "b", "c", "d")
        ]
        load[first(replicas, 2000, seed=i)] += 1
    assert load["a"] == max(load.values())
    assert min(load.values()) > 50


def test_credit_for_a_prefix_is_bounded():
    config = PolicyConfig(max_affinity=100)
    assert cost(Candidate("a", overlap_tokens=5000), 5000, config) == cost(
        Candidate("a", overlap_tokens=100), 5000, config
    )


def test_nearly_full_cache_is_avoided():
    assert {first([Candidate("a", kv_usage=0.99), Candidate("b", 100, 1)], seed=s) for s in range(10)} == {"b"}


def test_draining_replicas_are_left_out():
    assert rank([Candidate("a", draining=True), Candidate("b", 10**6)], 10, Random(0)) == ["b"]
    assert rank([Candidate("a", draining=True)], 10, Random(0)) == []
    assert rank([], 10, Random(0)) == []


def test_equals_are_not_all_sent_to_one():
    chosen = Counter(first([Candidate(n) for n in "abcd"], seed=s) for s in range(400))
    assert min(chosen.values()) > 50


def test_stale_figures_do_not_make_a_herd():
    """Two random ones compete, not all: the least loaded gets many, but not every request between two reports."""
    replicas = [Candidate(f"r{i}", outstanding_tokens=100 * i) for i in range(8)]
    chosen = Counter(first(replicas, 10, seed=s) for s in range(400))
    assert chosen["r0"] < 200
    assert len(chosen) >= 5


@given(
    st.lists(
        st.builds(
            Candidate,
            st.uuids().map(str),
            st.integers(0, 10**6),
            st.integers(0, 500),
            st.floats(0, 1),
            st.integers(0, 10**5),
            st.booleans(),
        ),
        max_size=8,
    ),
    st.integers(1, 10**5),
    st.integers(),
)
def test_ranking_holds_each_open_replica_once_and_depends_on_nothing_else(candidates, prompt, seed):
    ranked = rank(candidates, prompt, Random(seed))
    assert sorted(ranked) == sorted(c.replica_id for c in candidates if not c.draining)
    assert ranked == rank(candidates, prompt, Random(seed))


def test_impossible_pressure_is_refused_by_name():
    with pytest.raises(ConfigError) as caught:
        PolicyConfig(kv_pressure=1.0)
    assert caught.value.flag == "kv_pressure"


def test_index_counts_leading_blocks_only():
    index = PrefixIndex()
    index.update("a", 0, [1, 2, 4], [])
    index.update("b", 0, [1], [])
    assert index.overlaps([1, 2, 3, 4]) == {"a": 2, "b": 1}
    assert index.overlaps([2]) == {"a": 1}
    assert index.overlaps([9, 1]) == {}


def test_index_follows_removals_and_clearing():
    index = PrefixIndex()
    index.update("a", 0, [1, 2], [])
    index.update("a", 1, [3], [2])
    assert index.overlaps([1, 2]) == {"a": 1}
    index.update("a", 2, [7], [], cleared=True)
    assert index.overlaps([1]) == {}
    assert index.overlaps([7]) == {"a": 1}


def test_index_drops_what_it_knew_before_a_gap_and_passes_over_repeats():
    index = PrefixIndex()
    index.update("a", 0, [1], [])
    index.update("a", 1, [2], [])
    index.update("a", 1, [], [1, 2])
    assert index.overlaps([1, 2]) == {"a": 2}
    index.update("a", 3, [5], [])
    assert index.overlaps([1, 2]) == {}
    assert index.overlaps([5]) == {"a": 1}


def test_lost_replica_has_nothing_and_its_next_life_starts_empty():
    index = PrefixIndex()
    index.update("a", 0, [1], [])
    index.drop("a")
    assert index.overlaps([1]) == {}
    index.update("a", 0, [2], [])
    assert index.overlaps([1]) == {}
    assert index.overlaps([2]) == {"a": 1}


def test_index_is_bounded_and_forgets_the_oldest():
    index = PrefixIndex(max_blocks=10)
    index.update("a", 0, range(100), [])
    assert len(index) == 10
    assert index.overlaps([99]) == {"a": 1}
    assert index.overlaps([0]) == {}
