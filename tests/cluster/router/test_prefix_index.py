"""The index of the replicas' prefix caches: exact while every update arrives, forgetful, not wrong, otherwise."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.router import prefix_index
from cluster.router.prefix_index import FORGOTTEN_AT_ONCE, MAX_DEAD, STRIDE, PrefixIndex, PromptKeys
from cluster.wire.translation import block_key
from engine.kv.block_manager import prompt_hashes


class Keys(list):
    """Keys that are known beforehand."""

    def first(self, count: int) -> list[int]:
        assert count <= len(self)
        return self


def depths(index: PrefixIndex, *keys: int) -> dict[str, int]:
    return dict(index.look_up(Keys(keys)).depths)


def test_leading_blocks_only_count():
    index = PrefixIndex()
    index.update("a", 0, [1, 2, 4], [])
    index.update("b", 0, [1], [])
    assert depths(index, 1, 2, 3, 4) == {"a": 2, "b": 1}
    assert depths(index, 2) == {"a": 1}
    assert depths(index, 9, 1) == {}

    assert depths(index) == {}


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 40])
def test_prefixes_of_any_length_are_measured_to_the_block(length):
    index = PrefixIndex()
    keys = Keys(range(100, 100 + length))
    for held in range(length + 1):
        index.update(f"r{held}", 0, keys[:held], [])
    found = index.look_up(keys)
    assert found.depths == {f"r{held}": held for held in range(1, length + 1)}
    assert found.cold_key is None


def test_the_first_block_that_nobody_has_is_named():
    index = PrefixIndex()
    index.update("a", 0, range(10), [])
    index.update("b", 0, range(3), [])
    assert index.look_up(Keys(range(30))).cold_key == 10
    assert index.look_up(Keys([77, 78])).cold_key == 77
    assert index.look_up(Keys([])).cold_key is None
    assert PrefixIndex().look_up(Keys([5])).cold_key == 5


def heir(index: PrefixIndex, *keys: int) -> str | None:
    return index.look_up(Keys(keys)).heir


def test_the_heir_of_a_block_that_none_has_is_who_was_sent_it_or_had_it_last():
    index = PrefixIndex(max_blocks=100)
    index.update("a", 0, [1], [])
    index.update("b", 0, [1], [])
    assert heir(index, 1, 2) is None
    index.expect(2, "b")
    assert heir(index, 1, 2) == "b"
    index.update("a", 1, [2], [])
    assert heir(index, 1, 2) is None
    index.update("a", 2, [], [2])
    assert heir(index, 1, 2) == "a"
    index.drop("a")
    assert heir(index, 1, 2) is None
    for key in range(1000, 2000):
        index.expect(key, "b")
    assert len(index._heirs) <= 25
    assert heir(index, 1999) == "b"


def test_removals_and_clearing_are_followed():
    index = PrefixIndex()
    index.update("a", 0, [1, 2], [])
    index.update("a", 1, [3], [2])
    assert depths(index, 1, 2) == {"a": 1}
    assert index.update("a", 2, [7], [], cleared=True)
    assert depths(index, 1) == {}
    assert depths(index, 7) == {"a": 1}


def test_a_gap_is_told_until_all_is_told_anew_and_repeats_are_passed_over():
    index = PrefixIndex()
    assert index.update("a", 0, [1], [])
    assert index.update("a", 1, [2], [])
    assert index.update("a", 1, [], [1, 2])
    assert depths(index, 1, 2) == {"a": 2}
    assert not index.update("a", 3, [5], [])
    assert depths(index, 1, 2) == {}
    assert depths(index, 5) == {"a": 1}
    assert not index.update("a", 4, [6], [])
    assert not index.update("a", 2, [9], [])
    assert index.update("a", 5, [1, 2, 5, 6], [], cleared=True)
    assert depths(index, 1, 2) == {"a": 2}


def test_a_lost_last_update_is_noticed_by_their_number():
    index = PrefixIndex()
    index.update("a", 0, [1], [])
    assert index.heard_all("a", 1)
    assert depths(index, 1) == {"a": 1}
    assert not index.heard_all("a", 2)
    assert depths(index, 1) == {}
    assert index.update("a", 2, [1, 2], [], cleared=True)
    assert index.heard_all("a", 3)
    assert index.heard_all("never-heard-of", 0)


def test_a_lost_replica_has_nothing_and_its_next_life_starts_empty():
    index = PrefixIndex()
    index.update("a", 0, [1], [])
    index.drop("a")
    assert depths(index, 1) == {}
    index.update("a", 0, [2], [])
    assert depths(index, 1) == {}
    assert depths(index, 2) == {"a": 1}
    index.drop("unheard-of")


def test_many_lives_leave_nothing_behind():
    index = PrefixIndex()
    index.update("steady", 0, [1], [])
    for life in range(10 * MAX_DEAD):
        index.update(f"r{life % 7}", 0, [1, 2, 1000 + life], [])
        index.drop(f"r{life % 7}")
    assert depths(index, 1, 2) == {"steady": 1}
    assert len(index) <= 2 + MAX_DEAD
    assert len(index._names) <= 2 * MAX_DEAD


def test_it_is_bounded_and_forgets_what_was_stored_longest_ago():
    index = PrefixIndex(max_blocks=10)
    index.update("a", 0, range(100), [])
    assert len(index) == 10
    assert depths(index, 99) == {"a": 1}
    assert depths(index, 0) == {}
    index.update("a", 1, [90, 200], [])
    assert depths(index, 90) == {"a": 1}
    assert depths(index, 91) == {}


def test_a_full_index_is_swept_bit_by_bit_and_no_entry_of_a_former_life_comes_back(monkeypatch):
    monkeypatch.setattr(prefix_index, "SWEPT_AT_ONCE", 10)
    index = PrefixIndex()
    index.update("steady", 0, range(1000), [])
    for life in range(MAX_DEAD):
        index.update(f"r{life}", 0, range(life, 1000, 3), [])
        index.expect(2000 + life, f"r{life}")
        index.drop(f"r{life}")
    assert index._unswept, "the sweep has begun, and is not over"
    updates = 0
    while index._unswept:
        updates += 1
        index.update("steady", updates, [], range(500, 1000) if updates == 1 else [])
        assert depths(index, *range(1000)) == {"steady": 500}
    assert updates > 50
    for life in range(2 * MAX_DEAD):  # they are given the numbers of those that are gone
        index.update(f"s{life}", 0, [5000], [])
    assert depths(index, *range(1000)) == {"steady": 500}
    assert all(heir(index, 2000 + life) is None for life in range(MAX_DEAD))
    assert len(index._names) <= 3 * MAX_DEAD + 1


def test_what_is_forgotten_at_the_bound_is_the_oldest_and_little_at_a_time():
    index = PrefixIndex(max_blocks=1280)
    for number in range(3000):
        index.update("a", number, [number], [])
        assert min(number + 1, 1280 - 1280 // FORGOTTEN_AT_ONCE) <= len(index) <= 1280
        assert depths(index, number) == {"a": 1}
    held = [number for number in range(3000) if depths(index, number)]
    assert held == list(range(3000 - len(index), 3000))


def test_a_block_takes_less_than_200_bytes():
    """128 replicas, each block on one of them: the costly case, since what several hold is kept once."""
    keys = Random(0)
    batches = [[keys.getrandbits(64) for _ in range(160)] for _ in range(128)]
    index = PrefixIndex()
    tracemalloc.start()
    try:
        for i, batch in enumerate(batches):
            index.update(f"r{i}", 0, [key ^ 1 for key in batch], [])
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used / len(index) < 200


@given(st.lists(st.integers(0, 10**5), max_size=100), st.sampled_from([1, 4, 16]), st.binary(max_size=8))
def test_a_prompts_keys_are_those_of_its_hashes_however_they_are_asked_for(tokens, block_size, salt):
    expected = [block_key(digest) for digest in prompt_hashes(tokens, block_size, salt)]
    keys = PromptKeys(tokens, block_size, salt)
    assert len(keys) == len(expected)
    for count in range(len(expected) + 1):
        assert list(keys.first(count))[:count] == expected[:count]
    assert len(PromptKeys([2**40], 1)) == 0


class Cache:
    """One replica's prefix cache, closed under prefixes as real ones nearly are, and the updates that it sent."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.sent = 0

    def update(self, stored=(), removed=(), cleared=False):
        if cleared:
            self.held = set()
        self.held = (self.held - set(removed)) | set(stored)
        self.sent += 1
        return self.sent - 1, list(stored), list(removed), cleared

    def snapshot(self):
        return self.update(sorted(self.held), (), True)


CHAINS = [[100 * chain + i for i in range(2 * STRIDE + 3)] for chain in range(3)]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(CHAINS),
        st.integers(0, 2 * STRIDE + 3),
        st.sampled_from(["arrives", "arrives", "arrives", "lost", "twice", "late", "clears", "dies"]),
    ),
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(CHANGES)
def test_whatever_is_lost_repeated_or_reordered_nothing_is_promised_that_was_never_there(changes):
    """Against a model: what a complete index says is what the caches hold; an incomplete one never says more than was
    stored in this life, and says all again once it was told anew."""
    index, caches, late = PrefixIndex(), {"a": Cache(), "b": Cache()}, []
    complete, ever = {"a": True, "b": True}, {"a": set(), "b": set()}

    def deliver(name, update):
        complete[name] = index.update(name, *update)

    for name, chain, length, fate in changes:
        cache = caches[name]
        if fate == "dies":
            index.drop(name)
            caches[name], complete[name], ever[name] = Cache(), True, set()
            late = [one for one in late if one[0] != name]  # a later life has another link
            continue
        update = cache.update(
            [key for key in chain[:length] if fate == "clears" or key not in cache.held],
            [key for key in chain[length:] if key in cache.held],
            fate == "clears",
        )
        ever[name] |= cache.held
        if fate == "late":
            late.append((name, update))
        elif fate != "lost":
            for _ in range(2 if fate == "twice" else 1):
                deliver(name, update)
        if len(late) > 1:
            deliver(*late.pop(0))
        check(index, caches, complete, ever)
    for name, cache in caches.items():
        complete[name] = index.heard_all(name, cache.sent)
        if not complete[name]:
            deliver(name, cache.snapshot())
    for one in late:
        deliver(*one)
    assert complete == {"a": True, "b": True}
    check(index, caches, complete, ever)


def check(index, caches, complete, ever):
    for chain in CHAINS:
        found = index.look_up(Keys(chain)).depths
        for name, cache in caches.items():
            held = next((i for i, key in enumerate(chain) if key not in cache.held), len(chain))
            if complete[name] and index.heard_all(name, cache.sent):
                assert found.get(name, 0) == held
            else:
                complete[name] = False
                assert all(key in ever[name] for key in chain[: found.get(name, 0)])
