import pytest

from engine.errors import IntegrityError
from engine.kv.block_manager import BlockManager, prompt_hashes, token_bytes

SIZE = 2


def sealed(blocks, tokens, salt=b""):
    """Return a table that holds `tokens`, all full blocks of it findable."""
    table = blocks.allocate(-(-len(tokens) // SIZE))
    for i, digest in enumerate(prompt_hashes(tokens, SIZE, salt)):
        blocks.seal([table[i]], [digest], [token_bytes(tokens[i * SIZE : (i + 1) * SIZE])])
    return table


def match(blocks, tokens, salt=b""):
    return blocks.match(prompt_hashes(tokens, SIZE, salt), token_bytes(tokens))


def test_the_null_block_is_never_handed_out():
    blocks = BlockManager(5, SIZE)
    table = blocks.allocate(4)
    assert sorted(table) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="1 KV blocks wanted, 0 available"):
        blocks.allocate(1)
    blocks.check_integrity([table])


def test_an_allocation_that_fails_takes_nothing():
    blocks = BlockManager(5, SIZE)
    with pytest.raises(ValueError, match="5 KV blocks wanted, 4 available"):
        blocks.allocate(5)
    blocks.check_integrity([])
    assert blocks.num_available == 4


def test_freed_blocks_are_found_and_reused_until_they_are_taken():
    blocks = BlockManager(8, SIZE)
    table = sealed(blocks, [1, 2, 3, 4, 5])
    blocks.release(table)
    assert (blocks.num_free, blocks.num_cached) == (5, 2)
    found = match(blocks, [1, 2, 3, 4, 9, 9])
    assert found == table[:2]
    assert blocks.count_idle(found) == 2
    blocks.acquire(found)
    assert blocks.count_idle(found) == 0
    blocks.check_integrity([found])


def test_a_prefix_matches_only_as_far_as_it_is_equal():
    blocks = BlockManager(8, SIZE)
    table = sealed(blocks, [1, 2, 3, 4])
    assert match(blocks, [1, 2, 9, 4]) == table[:1]
    assert match(blocks, [9, 2, 3, 4]) == []
    assert match(blocks, [1, 2, 3, 4], salt=b"other tenant") == []


def test_empty_blocks_go_first_then_the_least_recently_used_tails_before_heads():
    blocks = BlockManager(8, SIZE)
    old, young = sealed(blocks, [1, 2, 3, 4]), sealed(blocks, [5, 6, 7, 8])
    blocks.release(old)
    blocks.release(young)
    blocks.allocate(3)
    assert blocks.num_cached == 4
    blocks.allocate(1)
    assert match(blocks, [1, 2, 3, 4]) == old[:1]
    blocks.allocate(1)
    assert match(blocks, [1, 2, 3, 4]) == []
    assert match(blocks, [5, 6, 7, 8]) == young


def test_a_hit_makes_a_block_recently_used():
    blocks = BlockManager(3, SIZE)
    a, b = sealed(blocks, [1, 2]), sealed(blocks, [3, 4])
    blocks.release(a)
    blocks.release(b)
    hit = match(blocks, [1, 2])
    blocks.acquire(hit)
    blocks.release(hit)
    blocks.allocate(1)
    assert match(blocks, [1, 2]) == a
    assert match(blocks, [3, 4]) == []


def test_of_two_equal_blocks_the_first_stays_known():
    blocks = BlockManager(8, SIZE)
    first, second = sealed(blocks, [1, 2]), sealed(blocks, [1, 2])
    assert match(blocks, [1, 2]) == first
    blocks.release(second)
    assert blocks.num_cached == 0
    blocks.check_integrity([first])
    assert len(blocks.take_events().stored) == 1


def test_a_hash_collision_is_seen_by_comparing_tokens():
    blocks = BlockManager(4, SIZE)
    (block,) = blocks.allocate(1)
    blocks.seal([block], [b"same digest"], [token_bytes([1, 2])])
    assert blocks.match([b"same digest"], token_bytes([1, 2])) == [block]
    assert blocks.match([b"same digest"], token_bytes([1, 3])) == []


def test_events_are_the_net_change_of_a_step():
    blocks = BlockManager(3, SIZE)
    first, second = prompt_hashes([1, 2], SIZE)[0], prompt_hashes([3, 4], SIZE)[0]
    table = sealed(blocks, [1, 2])
    assert blocks.take_events().stored == (first,)
    assert blocks.take_events().stored == ()
    blocks.release(table)
    blocks.release(blocks.allocate(2))
    assert blocks.take_events().removed == (first,)
    blocks.release(sealed(blocks, [3, 4]))
    blocks.release(blocks.allocate(2))
    events = blocks.take_events()
    assert (events.stored, events.removed) == ((), ())
    table = sealed(blocks, [3, 4])
    blocks.take_events()
    blocks.release(table)
    blocks.release(blocks.allocate(2))
    sealed(blocks, [3, 4])
    events = blocks.take_events()
    assert (events.stored, events.removed) == ((), ())
    assert blocks.known_hashes() == (second,)


def test_clearing_forgets_contents_and_keeps_what_is_held():
    blocks = BlockManager(6, SIZE)
    held, freed = sealed(blocks, [1, 2]), sealed(blocks, [3, 4])
    blocks.release(freed)
    blocks.take_events()
    blocks.clear_cache()
    events = blocks.take_events()
    assert events.cleared and not events.stored and not events.removed
    assert match(blocks, [1, 2]) == match(blocks, [3, 4]) == []
    assert (blocks.num_free, blocks.num_cached) == (4, 0)
    blocks.check_integrity([held])
    blocks.release(held)
    assert blocks.num_free == 5


def forked(blocks, table):
    """Return a second table of the same blocks."""
    blocks.acquire(table)
    return table.copy()


def parted(blocks, table, index):
    """Make a block of a table safe to write; return what was copied, and where to."""
    source, copy = table[index], blocks.part(table[index])
    table[index] = source if copy is None else copy
    return None if copy is None else (source, copy)


def test_writers_part_and_the_last_holder_writes_in_place():
    blocks = BlockManager(6, SIZE)
    a = blocks.allocate(2)
    b, c = forked(blocks, a), forked(blocks, a)
    shared = a[1]
    copies = [parted(blocks, table, 1) for table in (a, b, c)]
    assert copies == [(shared, a[1]), (shared, b[1]), None]
    assert len({a[1], b[1], c[1]}) == 3
    assert a[0] == b[0] == c[0]
    blocks.check_integrity([a, b, c])


def test_a_copy_without_a_free_block_changes_nothing():
    blocks = BlockManager(2, SIZE)
    a = blocks.allocate(1)
    b = forked(blocks, a)
    with pytest.raises(ValueError, match="available"):
        parted(blocks, b, 0)
    assert a == b == [1]
    blocks.check_integrity([a, b])


def test_blocks_that_nobody_held_are_told_apart_from_those_that_somebody_shares():
    blocks = BlockManager(10, SIZE)
    table = sealed(blocks, [1, 2, 3, 4])
    assert blocks.acquire(table) == []
    assert blocks.release(table) == []
    assert sorted(blocks.release(table)) == sorted(table)
    assert blocks.acquire(table) == table, "found again while they are only cached"
    blocks.check_integrity([table])


@pytest.mark.parametrize("tables", [[], [[1], [1]], [[1], [2]]])
def test_integrity_notices_wrong_reference_counts(tables):
    blocks = BlockManager(4, SIZE)
    blocks.allocate(1)
    with pytest.raises(IntegrityError, match="block"):
        blocks.check_integrity(tables)


def test_integrity_notices_lost_blocks_and_a_broken_index():
    blocks = BlockManager(4, SIZE)
    blocks._free.pop()
    with pytest.raises(IntegrityError, match="free"):
        blocks.check_integrity([])
    blocks = BlockManager(4, SIZE)
    table = sealed(blocks, [1, 2])
    blocks._hashes[table[0]] = b"another"
    with pytest.raises(IntegrityError, match="index"):
        blocks.check_integrity([table])
    blocks = BlockManager(4, SIZE)
    table = sealed(blocks, [1, 2])
    blocks._index.clear()
    with pytest.raises(IntegrityError, match="differ"):
        blocks.check_integrity([table])
