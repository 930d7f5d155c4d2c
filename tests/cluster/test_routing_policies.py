"""The routing policies: load and cached prefixes weighed, hot prefixes spread, conversations kept together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.client_id import checked_session
from cluster.config import parse_config
from cluster.errors import ApiError
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.routing_policies import (
    ROUTING_POLICIES,
    PolicyConfig,
    RoutingQuery,
    cost,
    kv_aware,
    named_pair,
    policy_named,
    session,
)
from engine.errors import ConfigError

CONFIG = PolicyConfig()
NAMES = "abcdefgh"


@dataclass(frozen=True, slots=True)
class Standing:
    """A candidate as plain figures."""

    replica_id: str
    outstanding_tokens: int = 0
    num_requests: int = 0
    kv_usage: float = 0.0


def pick(name: str, candidates: list[Standing], query: RoutingQuery | None = None, seed: int = 0) -> str:
    return policy_named(name).pick(candidates, query or RoutingQuery(1000), Random(seed), CONFIG).replica_id


def idle(names: str = NAMES) -> list[Standing]:
    return [Standing(name) for name in names]


def grown(pool: list[Standing], name: str, **more: int) -> list[Standing]:
    return [
        replace(one, num_requests=one.num_requests + more.get("requests", 1)) if one.replica_id == name else one
        for one in pool
    ]


@pytest.mark.parametrize("name", ["kv_aware", "power_of_two", "least_tokens"])
def test_an_idle_replica_is_preferred_to_a_loaded_one(name):
    pool = [Standing("a", 5000, 10), Standing("b")]
    chosen = Counter(pick(name, pool, seed=seed) for seed in range(50))
    assert chosen["b"] >= (50 if name != "kv_aware" else 30)
    assert set(chosen) <= ({"b"} if name != "kv_aware" else {"a", "b"})


def test_a_cached_prefix_is_followed():
    query = RoutingQuery(1000, {"b": 800})
    assert {pick("kv_aware", idle(), query, seed) for seed in range(50)} == {"b"}


def test_the_longer_of_two_cached_prefixes_is_followed_unless_the_load_is_worth_more():
    query = RoutingQuery(1000, {"b": 800, "c": 600})
    assert {pick("kv_aware", idle(), query, seed) for seed in range(20)} == {"b"}
    pool = [Standing("a"), Standing("b", outstanding_tokens=200), Standing("c")]
    assert {pick("kv_aware", pool, query, seed) for seed in range(20)} == {"b"}
    pool = [Standing("a"), Standing("b", outstanding_tokens=600), Standing("c")]
    assert {pick("kv_aware", pool, query, seed) for seed in range(20)} == {"c"}


def test_a_hot_prefix_spreads_once_its_home_is_loaded_and_no_further_than_its_load():
    """Each request adds to the load of where it goes, which from then on has the prefix too."""
    few, many = spread_of(20), spread_of(600)
    assert set(few) == {"a"}
    assert len(many) == len(NAMES)
    assert max(many.values()) < 4 * min(many.values())


def spread_of(requests: int) -> Counter[str]:
    pool, homes, chosen = idle(), {"a": 2000}, Counter()
    for seed in range(requests):
        name = pick("kv_aware", pool, RoutingQuery(2000, dict(homes)), seed)
        pool, homes[name] = grown(pool, name), 2000
        chosen[name] += 1
    return chosen


def test_leaving_a_prefix_must_pay_by_more_than_computing_it_again():
    query = RoutingQuery(1000, {"a": 1000})
    for load, stays in ((1000, True), (2999, True), (3001, False)):
        pool = [Standing("a", outstanding_tokens=load), Standing("b")]
        chosen = {pick("kv_aware", pool, query, seed) for seed in range(40)}
        assert ("b" not in chosen) == stays


def test_the_longer_all_queues_are_the_more_load_a_home_may_have():
    """Where everybody waits, computing a prefix twice makes all wait longer."""
    query = RoutingQuery(1000, {"a": 1000})
    for load, stays in ((10_000 + 3000, True), (52_000, True), (54_000, False)):
        pool = [Standing("a", outstanding_tokens=load), Standing("b", outstanding_tokens=10_000)]
        chosen = {pick("kv_aware", pool, query, seed) for seed in range(40)}
        assert ("b" not in chosen) == stays


def test_a_prefix_comes_back_to_who_had_it_last_or_was_sent_it():
    for heir in NAMES:
        assert {pick("kv_aware", idle(), RoutingQuery(1000, cold_key=5, heir=heir), seed) for seed in range(20)} == {
            heir
        }
    gone = RoutingQuery(1000, cold_key=5, heir="gone")
    pair = {one.replica_id for one in named_pair(idle(), 5)}
    assert {pick("kv_aware", idle(), gone, seed) for seed in range(20)} <= pair


def test_prompts_that_begin_alike_go_to_one_of_two_replicas_before_any_has_their_blocks():
    for key in (3, 2**63 + 12345, 0xDEADBEEF12345678):
        query = RoutingQuery(1000, cold_key=key)
        chosen = Counter(pick("kv_aware", idle(), query, seed) for seed in range(100))
        assert set(chosen) <= {one.replica_id for one in named_pair(idle(), key)}


def test_new_prefixes_are_spread_over_all_replicas():
    keys = Random(0)
    chosen = Counter(
        pick("kv_aware", idle(), RoutingQuery(1000, cold_key=keys.getrandbits(64)), seed) for seed in range(800)
    )
    assert min(chosen.values()) > 60


def test_a_new_prefix_leaves_its_pair_when_both_are_loaded():
    key = 77
    pair = {one.replica_id for one in named_pair(idle(), key)}
    pool = [Standing(name, outstanding_tokens=5000 if name in pair else 0) for name in NAMES]
    chosen = Counter(pick("kv_aware", pool, RoutingQuery(1000, cold_key=key), seed) for seed in range(100))
    assert sum(chosen[name] for name in pair) < 40
    assert set(chosen) >= set(NAMES) - pair


def test_a_nearly_full_kv_cache_is_avoided():
    pool = [Standing("a", kv_usage=0.99), Standing("b", 100, 1)]
    query = RoutingQuery(1000, cold_key=1)
    assert {pick("kv_aware", pool, query, seed) for seed in range(20)} == {"b"}
    assert cost(Standing("a", kv_usage=0.8), 10, 0, 0, CONFIG) == cost(Standing("a"), 10, 0, 0, CONFIG)


def test_a_full_kv_cache_is_no_reason_to_leave_a_prefix_that_is_in_it():
    full, free = Standing("a", kv_usage=1.0), Standing("b")
    assert cost(full, 1000, 1000, 0, CONFIG) == cost(free, 1000, 1000, 0, CONFIG)


def test_stale_figures_do_not_make_a_herd():
    """Short prompts: two random ones compete, so that not all requests between two reports go to the same."""
    pool = [Standing(name, outstanding_tokens=100 * i) for i, name in enumerate(NAMES)]
    chosen = Counter(pick("kv_aware", pool, RoutingQuery(10), seed) for seed in range(400))
    assert chosen["a"] < 200
    assert len(chosen) >= 5


def test_round_robin_takes_one_after_the_other():
    assert [pick("round_robin", idle("abc"), RoutingQuery(5, turn=turn)) for turn in range(5)] == list("abcab")


def test_power_of_two_never_takes_the_most_loaded_one_and_uses_all_others():
    pool = [Standing(name, num_requests=i) for i, name in enumerate(NAMES)]
    chosen = Counter(pick("power_of_two", pool, seed=seed) for seed in range(400))
    assert set(chosen) == set(NAMES[:-1])


def test_least_tokens_takes_the_least_and_lets_equals_take_turns():
    pool = [Standing("a", 50, 0), Standing("b", 10, 9), Standing("c", 10, 2), Standing("d", 10, 2)]
    chosen = Counter(pick("least_tokens", pool, seed=seed) for seed in range(200))
    assert set(chosen) == {"c", "d"}
    assert min(chosen.values()) > 20


def test_a_session_stays_where_it_is_while_loads_are_even():
    homes = {}
    for i in range(200):
        query = RoutingQuery(100, session=f"s{i}".encode())
        chosen = {pick("session", idle(), query, seed) for seed in range(3)}
        assert len(chosen) == 1
        homes[i] = chosen.pop()
    assert min(Counter(homes.values()).values()) > 8


def test_a_replica_that_leaves_moves_only_its_own_sessions():
    queries = [RoutingQuery(100, session=f"s{i}".encode()) for i in range(200)]
    before = [pick("session", idle(), query) for query in queries]
    after = [pick("session", idle("abcdefg"), query) for query in queries]
    assert all(one == two for one, two in zip(before, after, strict=True) if one != "h")
    assert "h" in before


def test_no_replica_gets_far_more_sessions_than_the_mean():
    """Hashing alone would leave some with twice the others'; sessions beyond the bound go to the next on the ring."""
    pool, query = idle(), [RoutingQuery(100, session=f"s{i}".encode()) for i in range(400)]
    for one in query:
        pool = grown(pool, pick("session", pool, one))
    assert max(one.num_requests for one in pool) <= 1.25 * 401 / 8 + 1


def test_without_a_session_id_the_cached_prefix_decides():
    query = RoutingQuery(1000, {"c": 900})
    assert {session(idle(), query, Random(seed), CONFIG).replica_id for seed in range(20)} == {"c"}


@pytest.mark.parametrize("wrong", ["a b", "x" * 257, "\u00e9", "\n"])
def test_a_session_id_that_is_none_is_refused_by_the_headers_name(wrong):
    with pytest.raises(ApiError, match="x-session-id") as caught:
        checked_session(wrong)
    assert (caught.value.status, caught.value.param) == (400, "x-session-id")
    assert checked_session("") == ""
    assert checked_session("f81d4fae-7dec") == "f81d4fae-7dec"


POOLS = st.lists(
    st.builds(Standing, st.uuids().map(str), st.integers(0, 10**6), st.integers(0, 500), st.floats(0, 1)),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.replica_id,
)


@pytest.mark.parametrize("name", ROUTING_POLICIES)
@given(POOLS, st.data(), st.integers(1, 10**5), st.integers(0, 2**64 - 1) | st.none(), st.binary(max_size=4))
def test_every_policy_chooses_a_candidate_and_depends_on_nothing_else(name, pool, data, prompt, cold, session_id):
    overlaps = {one.replica_id: data.draw(st.integers(1, prompt)) for one in pool if data.draw(st.booleans())}
    heir = data.draw(st.sampled_from([None, "gone", *(one.replica_id for one in pool)]))
    query = RoutingQuery(prompt, overlaps, cold, heir, session_id, data.draw(st.integers(0, 10**6)))
    seed = data.draw(st.integers())
    first, second = (policy_named(name).pick(pool, query, Random(seed), CONFIG) for _ in range(2))
    assert first is second
    assert first in pool


def test_two_routers_choose_the_same_home_for_a_new_prefix():
    """Their random numbers differ; what decides is the name of the first block that nobody has."""
    names, seeds = Random(5), iter(range(10**6))
    agreed = 0
    for _ in range(500):
        query = RoutingQuery(2000, cold_key=names.getrandbits(64))
        one, two = (kv_aware(idle(), query, Random(next(seeds)), CONFIG).replica_id for _ in range(2))
        agreed += one == two
    assert agreed >= 495


@pytest.mark.parametrize(
    ("setting", "value"),
    [("kv_pressure", 1.0), ("hysteresis", -0.1), ("request_cost", -1.0), ("imbalance", -1.0), ("session_load", 1.0)],
)
def test_impossible_weights_are_refused_by_name(setting, value):
    with pytest.raises(ConfigError) as caught:
        PolicyConfig(**{setting: value})
    assert caught.value.flag == setting


@pytest.mark.parametrize("make", [lambda name: DispatcherConfig(routing_policy=name), policy_named])
def test_an_unknown_policy_is_refused_with_the_names_of_those_there_are(make):
    with pytest.raises(ConfigError, match=r"kv_aware, power_of_two, round_robin, session, least_tokens, not 'x'"):
        make("x")


def test_the_setting_is_checked_with_all_others():
    assert parse_config({"model": "demo", "routing-policy": "session"}).routing_policy == "session"
    with pytest.raises(ConfigError, match="least_tokens") as caught:
        parse_config({"model": "demo", "routing_policy": "random"})
    assert caught.value.flag == "routing_policy"
