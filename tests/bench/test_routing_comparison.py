"""What the benchmark of the routing policies shows, in small; in virtual time, so the same on every machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.routing import run
from tests.bench.shared_prefixes import Workload, oracle_hit_tokens

SKEWED = Workload("skewed", 64, 1.0, 160, prefix=1024, output=24)
HOT = Workload("hot", 64, 1.6, 160, prefix=1024, output=24)
UNIQUE = Workload("unique", 0, 0.0, 100, prefix=1024, output=24)


@pytest.mark.parametrize("workload", [SKEWED, HOT], ids=lambda one: one.name)
def test_kv_aware_routing_finds_more_and_answers_sooner_than_round_robin(workload):
    ours, theirs = (run(workload, name, replicas=4, clients=32, share=0.73) for name in ("kv_aware", "round_robin"))
    assert ours.hit_rate > theirs.hit_rate + 0.05
    assert ours.tokens_per_s > 1.05 * theirs.tokens_per_s
    assert ours.ttft_p50 <= theirs.ttft_p50
    assert ours.rejects == theirs.rejects == 0


def test_nothing_is_lost_where_no_two_prompts_begin_alike():
    ours, theirs = (run(UNIQUE, name, replicas=4, clients=32, share=0.73) for name in ("kv_aware", "round_robin"))
    assert ours.hit_rate == theirs.hit_rate == 0
    assert ours.tokens_per_s > 0.97 * theirs.tokens_per_s
    assert ours.ttft_p90 < 1.1 * theirs.ttft_p90


def test_no_policy_finds_more_than_the_oracle():
    prompts = SKEWED.prompts()
    best = oracle_hit_tokens(prompts, 10**6, 16) / sum(map(len, prompts))
    assert run(SKEWED, "kv_aware", replicas=4, clients=8, share=1.0).hit_rate <= best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6).map(tuple), max_size=12), st.integers(1, 8))
def test_the_oracle_is_what_the_best_of_all_ways_to_give_up_blocks_finds_at_most(prompts, size):
    """With room for all it counts what came before; with less it finds no more, and no less than with even less."""
    found = [oracle_hit_tokens(prompts, blocks, 1) for blocks in (size, size + 1, 10**6)]
    assert found == sorted(found)
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for prompt in prompts:
        repeated += sum(prompt[:end] in seen for end in range(1, len(prompt)))
        seen |= {prompt[:end] for end in range(1, len(prompt) + 1)}
    assert found[-1] == repeated
