"""What one tenant keeps takes no room of another's."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from cluster.accounts.tenant_bytes import TenantBytes

MOST = 100


class Shelf:
    """Things of tenants, the oldest first; those of `stays` may not go."""

    def __init__(self, stays: str = "") -> None:
        self.kept: dict[str, list[int]] = defaultdict(list)
        self.gone: list[str] = []
        self.bytes = TenantBytes(MOST, self.evict)
        self._stays = stays

    def evict(self, tenant: str) -> bool:
        if tenant in self._stays or not self.kept[tenant]:
            return False
        self.bytes.give_back(tenant, self.kept[tenant].pop(0))
        self.gone.append(tenant)
        return True

    def put(self, tenant: str, size: int) -> bool:
        if not self.bytes.reserve(tenant, size):
            return False
        self.kept[tenant].append(size)
        return True

    def of(self, tenant: str) -> int:
        return sum(self.kept[tenant])


def test_one_may_take_all_until_another_comes_and_then_gives_its_oldest_back() -> None:
    shelf = Shelf()
    assert all(shelf.put("big", 10) for _ in range(10))
    assert shelf.put("big", 10) and shelf.gone == ["big"]
    assert all(shelf.put("small", 10) for _ in range(8))
    assert shelf.of("big") == shelf.of("small") == MOST / 2
    assert shelf.gone == ["big"] * 6 + ["small"] * 3


def test_where_nothing_may_go_a_tenant_within_its_share_is_served_and_the_other_is_not() -> None:
    shelf = Shelf(stays="big")
    assert shelf.put("big", MOST) and not shelf.put("big", 1)
    assert shelf.put("small", MOST // 2) and not shelf.put("big", 1)
    assert not Shelf().put("small", MOST + 1)


def test_however_many_come_one_after_the_other_they_take_twice_of_it_at_most() -> None:
    tenants = "abcdefghijklmnopqrstuvwxyz"
    shelf = Shelf(stays=tenants)
    for tenant in tenants:
        assert tenant > "d" or any(shelf.put(tenant, size) for size in range(MOST, 0, -1))
        any(shelf.put(tenant, size) for size in range(MOST, 0, -1))
    assert shelf.bytes.num_bytes == 2 * MOST
    assert shelf.bytes.make_room("d", 0), "what it has within its share it keeps"


PUTS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40)), max_size=60)


@given(PUTS, st.sampled_from(["", "a", "ab"]))
def test_no_tenant_loses_what_is_within_its_share(puts: list[tuple[str, int]], stays: str) -> None:
    shelf = Shelf(stays)
    for tenant, size in puts:
        before = {one: shelf.of(one) for one in "abcd"}
        shelf.put(tenant, size)
        share = MOST / len({one for one in "abcd" if before[one]} | {tenant})
        for one in "abcd":
            assert one == tenant or before[one] > share or shelf.of(one) == before[one]
        assert shelf.bytes.num_bytes == sum(map(shelf.of, "abcd")) <= (2 if stays else 1) * MOST
