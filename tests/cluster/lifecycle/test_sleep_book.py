"""Orders to sleep are kept for those who start later, and found by those who look."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import ApiError
from cluster.lifecycle import control_store, sleep_book
from cluster.lifecycle.sleep_book import StoredOrders, watch
from cluster.sleep_orders import SleepOrder


class KeyValues:
    """Ray's control store, which may be gone for a while."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.gone = False

    def _internal_kv_get(self, key: str, namespace: bytes) -> bytes | None:
        self._check()
        return self.kept.get(key)

    def _internal_kv_put(self, key: str, value: bytes, overwrite: bool, namespace: bytes) -> None:
        self._check()
        self.kept[key] = value

    def _check(self) -> None:
        if self.gone:
            raise RuntimeError("the head is gone")


@pytest.fixture
def kept(monkeypatch) -> KeyValues:
    kept = KeyValues()
    monkeypatch.setattr(control_store, "internal_kv", kept)
    monkeypatch.setattr(sleep_book, "LOOK_SECONDS", 0.01)
    return kept


def test_an_order_outlives_who_gave_it_and_is_of_one_model(kept):
    order = SleepOrder().sleeping(2, "wait")
    StoredOrders("app", "Replica").write(order)
    assert StoredOrders("app", "Replica").read() == order
    assert StoredOrders("app", "Replica-two").read() == StoredOrders("other", "Replica").read() == SleepOrder()


def test_a_store_that_is_silent_says_so_and_changes_nothing(kept):
    kept.gone = True
    book = StoredOrders("app", "Replica")
    for act in (book.read, lambda: book.write(SleepOrder())):
        with pytest.raises(ApiError, match="control store") as failed:
            act()
        assert failed.value.status == 503
    assert not kept.kept


async def test_who_looks_hears_of_each_order_once_also_after_the_store_was_gone(kept):
    heard: asyncio.Queue[SleepOrder] = asyncio.Queue()
    book = StoredOrders("app", "Replica")
    first = SleepOrder().sleeping(1, "")
    book.write(first)
    watch(book, asyncio.get_running_loop(), heard.put_nowait)
    async with asyncio.timeout(10):
        assert await heard.get() == first, "an order that was given before"
        kept.gone = True
        await asyncio.sleep(0.05)
        kept.gone = False
        second = first.waking(["weights", "kv_cache"])
        book.write(second)
        assert await heard.get() == second
    await asyncio.sleep(0.05)
    assert heard.empty()


def test_orders_follow_one_another():
    asleep = SleepOrder().sleeping(2, "keep")
    assert (asleep.number, asleep.level, asleep.asleep) == (1, 2, ("weights", "kv_cache"))
    part = asleep.waking(["weights"])
    assert (part.number, part.level, part.asleep) == (2, 2, ("kv_cache",))
    awake = part.waking(["kv_cache"])
    assert (awake.number, awake.level, awake.asleep) == (3, 0, ())
    with pytest.raises(ValueError, match="level"):
        awake.sleeping(3, "")
