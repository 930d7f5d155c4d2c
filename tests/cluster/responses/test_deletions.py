"""Deletions are remembered in bounded room, which tenants share, and telling each other of them comes to an end."""

from __future__ import annotations

from collections import deque

import pytest

from cluster.responses import deletions
from cluster.responses.deletions import Deletions
from cluster.wire.answer_messages import Deletion

MOST = 100


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember few."""
    monkeypatch.setattr(deletions, "MOST", MOST)


def some(tenant: str, count: int, first: int = 0, left: float = 600.0) -> list[Deletion]:
    return [Deletion(f"resp_{first + n}", tenant, "b", left + n) for n in range(count)]


def names(known: Deletions, tenant: str, now: float = 0.0) -> set[str]:
    return {one.name for said in known.told(now) for one in said.deletions if one.tenant == tenant}


def test_tenants_share_one_bound_and_each_loses_what_is_over_first() -> None:
    known = Deletions()
    for tenant in "abcd":
        known.learn(some(tenant, 5 * MOST), 0.0)
    assert [names(known, tenant) for tenant in "abcd"] == [{f"resp_{5 * MOST - n - 1}" for n in range(25)}] * 4
    known.learn(some("e", 10, left=3000.0), 2000.0)
    assert names(known, "a", 2000.0) == set() and len(names(known, "e", 2000.0)) == 10
    assert not known.knows("a", f"resp_{5 * MOST - 1}", "b")


def test_telling_each_other_comes_to_an_end_where_there_are_more_than_are_remembered() -> None:
    """Two sides of a healed cut, each with as many of its own: what one forgets for the other's is not news again."""
    nodes = [Deletions() for _ in range(4)]
    inboxes = deque((node, some("a", MOST, first=MOST * (node % 2), left=600.0 + node % 2)) for node in range(4))
    for _ in range(200):
        if not inboxes:
            break
        node, told = inboxes.popleft()
        new = nodes[node].learn(told, 0.0)
        inboxes.extend((other, list(new)) for other in range(4) if other != node and new)
    assert not inboxes
    assert len({frozenset(names(node, "a")) for node in nodes}) == 1
