"""Copies of answers on a replica: the latest router counts, those of lost routers are offered, room is bounded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.replica import answer_keeper
from cluster.replica.answer_keeper import AnswerKeeper
from cluster.wire.answer_messages import (
    Deleted,
    Deletion,
    Disclaim,
    Fetch,
    Fetched,
    Followed,
    Forget,
    Keep,
    Orphaned,
    Superseded,
)


class Router:
    """A router's session that remembers what it is told. followed: its answers that others ask for."""

    def __init__(self, name: str) -> None:
        self.link = SimpleNamespace(router_id=name)
        self.told: list[Any] = []
        self.followed: list[str] = []

    def send(self, message: Any) -> None:
        if isinstance(message, Followed):
            self.followed.append(message.name)
        else:
            self.told.append(message)


class Lab:
    """A keeper and its routers."""

    def __init__(self, *names: str, most_bytes: int = 1 << 20) -> None:
        self.routers = [Router(name) for name in names]
        self.linked: list[Any] = list(self.routers)
        self.keeper = AnswerKeeper(lambda: self.linked, most_bytes)

    def keep(self, router: Router, name: str = "resp_1", epoch: int = 0, **changes: Any) -> None:
        given: dict[str, Any] = {
            "tenant": "ann",
            "head": b"head",
            "born": "1",
            "first": 0,
            "notes": (b"a",),
            "retention": 60.0,
        }
        self.keeper.take(router, Keep(name, epoch, **given | changes))  # type: ignore[arg-type]  # a fake session

    def fetch(self, router: Router, name: str = "resp_1", tenant: str | None = "ann", **changes: Any) -> Fetched:
        self.keeper.take(router, Fetch(7, name, tenant, **changes))  # type: ignore[arg-type]
        return router.told.pop()  # type: ignore[no-any-return]

    def leave(self, router: Router) -> None:
        self.linked.remove(router)
        self.keeper.left(router, drained=False)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_keeper, "TURN", 0.001)


async def test_notes_said_twice_count_once() -> None:
    lab = Lab("one", "two")
    one, two = lab.routers
    lab.keep(one, notes=(b"a", b"b"))
    lab.keep(one, head=b"", first=1, notes=(b"b", b"c"))
    lab.keep(one, head=b"", first=9, notes=(b"z",))  # what came between is missing: it is not taken in
    assert lab.fetch(two) == Fetched(7, "resp_1", 0, b"head", (b"a", b"b", b"c"), owner="one", owned=True)
    assert lab.fetch(two, known=2) == Fetched(7, "resp_1", 0, b"", (b"c",), owner="one", owned=True)


async def test_who_waits_is_answered_with_the_next_note() -> None:
    lab = Lab("one", "two")
    one, two = lab.routers
    lab.keep(one)
    lab.keeper.take(two, Fetch(8, "resp_1", "ann", known=1, wait=60.0))  # type: ignore[arg-type]
    assert not two.told
    lab.keep(one, head=b"", first=1, notes=(b"b",), end=b"end")
    (news,) = two.told
    assert (news.ticket, news.head, news.notes, news.end) == (8, b"", (b"b",), b"end")


async def test_other_tenants_find_nothing() -> None:
    lab = Lab("one")
    lab.keep(lab.routers[0])
    assert lab.fetch(lab.routers[0], tenant="bob") == Fetched(7)
    assert lab.fetch(lab.routers[0], tenant=None).name == "resp_1"


async def test_a_later_epoch_replaces_an_earlier_one_and_not_the_other_way() -> None:
    lab = Lab("one", "two")
    one, two = lab.routers
    lab.keep(one, notes=(b"a", b"b"))
    lab.keep(two, epoch=1, notes=(b"c",))
    assert one.told == [Superseded("resp_1", 1)]
    lab.keep(one, head=b"", first=2, notes=(b"late",))
    assert one.told == [Superseded("resp_1", 1)] * 2
    assert lab.fetch(two).notes == (b"c",)


async def test_of_two_that_begin_the_same_one_keeps_it() -> None:
    """Whichever comes first."""
    for order in ((0, 1), (1, 0)):
        lab = Lab("one", "two")
        for number in order:
            lab.keep(lab.routers[number], notes=(b"%d" % number,))
        assert lab.fetch(lab.routers[1]).notes == (b"1",)
        assert lab.routers[0].told == [Superseded("resp_1", 0)]


async def test_what_was_deleted_comes_back_by_no_late_word_and_another_one_by_its_name_does() -> None:
    lab = Lab("one", "two")
    one, two = lab.routers
    lab.keep(one)
    lab.keeper.take(two, Deleted((Deletion("resp_1", "bob", "1", 60.0),)))  # type: ignore[arg-type]
    assert lab.fetch(two).name == "resp_1"
    one.told.clear()
    said = Deleted((Deletion("resp_1", "ann", "1", 60.0),))
    for _ in range(2):
        lab.keeper.take(two, said)  # type: ignore[arg-type]
    assert one.told == [said], "it is passed on once"
    lab.keep(one)
    assert lab.fetch(two) == Fetched(7)
    lab.keep(one, born="2")
    assert lab.fetch(two).name == "resp_1"


async def test_the_answers_of_a_lost_router_are_offered_by_all_replicas_to_the_same_one() -> None:
    labs = [Lab("one", "two", "three", "four") for _ in range(2)]
    names = [f"resp_{number}" for number in range(20)]
    for lab in labs:
        for name in names:
            lab.keep(lab.routers[0], name)
        lab.leave(lab.routers[0])
    offered = []
    for lab in labs:
        while sum(len(router.told) for router in lab.routers) < len(names):
            await asyncio.sleep(0.001)
        offered.append({message.name: one.link.router_id for one in lab.routers for message in one.told})
    assert offered[0] == offered[1]
    assert set(offered[0]) == set(names)
    assert len(set(offered[0].values())) == 3


async def test_what_nobody_takes_is_offered_to_the_next() -> None:
    lab = Lab("one", "two", "three")
    lab.keep(lab.routers[0])
    lab.leave(lab.routers[0])
    while not all(Orphaned("resp_1") in router.told for router in lab.routers[1:]):
        await asyncio.sleep(0.001)


def claim(lab: Lab, router: Router) -> str:
    """Claim the answer, and return which router goes first if another one claims it."""
    return lab.fetch(router, tenant=None, claims=True).rival


async def test_what_a_router_has_claimed_is_offered_to_no_other_one() -> None:
    lab = Lab("one", "two", "three")
    one, two, three = lab.routers
    lab.keep(one)
    lab.leave(one)
    assert [claim(lab, two), claim(lab, two)] == ["", ""]
    assert claim(lab, three) in ("first", "second")
    lab.keeper.take(three, Disclaim("resp_1"))  # type: ignore[arg-type]  # it is not this one's
    for _ in range(3 * answer_keeper.OFFER_AGAIN):
        await asyncio.sleep(answer_keeper.TURN)
    assert not two.told + three.told


@pytest.mark.parametrize("way", ["disclaim", "leave", "time"])
async def test_a_claim_that_comes_to_nothing_is_offered_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "time":
        monkeypatch.setattr(answer_keeper, "CLAIM", 5)
    lab = Lab("one", "two", "three")
    one, two, three = lab.routers
    lab.keep(one)
    lab.leave(one)
    assert claim(lab, two) == ""
    if way == "disclaim":
        lab.keeper.take(two, Disclaim("resp_1"))  # type: ignore[arg-type]
    elif way == "leave":
        lab.leave(two)
    while Orphaned("resp_1") not in two.told + three.told:
        await asyncio.sleep(0.001)
    assert claim(lab, three) == ""


async def test_of_two_that_claim_it_at_two_replicas_the_same_one_goes_first() -> None:
    labs = [Lab("one", "two", "three") for _ in range(2)]
    for lab in labs:
        lab.keep(lab.routers[0])
        lab.leave(lab.routers[0])
    assert [claim(labs[0], labs[0].routers[1]), claim(labs[1], labs[1].routers[2])] == ["", ""]
    assert {claim(labs[0], labs[0].routers[2]), claim(labs[1], labs[1].routers[1])} == {"first", "second"}


async def test_the_router_of_an_answer_hears_that_another_one_asks_for_it() -> None:
    lab = Lab("one", "two")
    one, two = lab.routers
    lab.keep(one)
    lab.fetch(one)
    assert not one.followed
    lab.fetch(two)
    lab.fetch(two)
    assert one.followed == ["resp_1"]
    lab.keep(one, head=b"", first=1, notes=(), end=b"end")
    lab.fetch(two)
    assert one.followed == ["resp_1"]


async def test_the_next_router_of_an_answer_that_has_ended_gives_it_no_more_time() -> None:
    lab = Lab("one", "two")
    one, two = lab.routers
    lab.keep(one, end=b"end", age=50.0)
    assert 50.0 <= lab.fetch(two).age < 60.0
    lab.keep(two, epoch=1, end=b"end", age=lab.fetch(two).age)
    assert lab.fetch(two).age >= 50.0
    lab.keep(two, epoch=2, end=b"end", age=60.0)
    while len(lab.keeper):
        await asyncio.sleep(0.001)


async def test_it_is_dropped_when_its_time_has_come() -> None:
    lab = Lab("one")
    lab.keep(lab.routers[0], end=b"end", retention=0.01)
    lab.keep(lab.routers[0], "resp_2", retention=0.01)  # it runs
    while len(lab.keeper) > 1:
        await asyncio.sleep(0.001)
    assert lab.fetch(lab.routers[0], "resp_2").name == "resp_2"


async def test_the_oldest_that_have_ended_make_room() -> None:
    lab = Lab("one", most_bytes=10_000)
    lab.keep(lab.routers[0], "runs", notes=(bytes(3000),))
    for number in range(8):
        lab.keep(lab.routers[0], f"resp_{number}", notes=(bytes(3000),), end=b"end")
    kept = [name for name in ("runs", *[f"resp_{n}" for n in range(8)]) if lab.fetch(lab.routers[0], name).name]
    assert kept == ["runs", "resp_6", "resp_7"]


async def test_copies_of_one_tenant_take_no_room_of_anothers() -> None:
    lab = Lab("one", most_bytes=10_000)
    (one,) = lab.routers
    lab.keep(one, "anns", notes=(bytes(3000),), end=b"end")
    for number in range(8):
        lab.keep(one, f"bobs_{number}", tenant="bob", notes=(bytes(3000),), end=b"end" if number < 4 else b"")
    assert lab.fetch(one, "anns").name
    assert len(lab.keeper) == 3
    lab.keep(one, "anns_next", notes=())
    assert lab.fetch(one, "anns_next").name


async def test_where_running_ones_fill_it_what_grows_is_not_kept_and_its_router_told() -> None:
    lab = Lab("one", most_bytes=10_000)
    (one,) = lab.routers
    names = [f"resp_{number}" for number in range(4)]
    for name in names:
        lab.keep(one, name, notes=())
    for name in names:
        lab.keep(one, name, head=b"", notes=(bytes(3000),))
    lab.keep(one, "large", head=bytes(3000))
    assert one.told == [Superseded("resp_3", 0, full=True), Superseded("large", 0, full=True)]
    assert [name for name in (*names, "large") if lab.fetch(one, name).name] == names[:3]


async def test_a_router_takes_back_its_own_copy_alone() -> None:
    lab = Lab("one", "two")
    one, two = lab.routers
    lab.keep(one, epoch=1)
    for router, epoch in ((one, 0), (two, 1)):
        lab.keeper.take(router, Forget("resp_1", "ann", epoch))  # type: ignore[arg-type]
        assert lab.fetch(two).name == "resp_1"
    lab.keeper.take(one, Forget("resp_1", "ann", 1))  # type: ignore[arg-type]
    assert lab.fetch(two) == Fetched(7)
    lab.keep(two)
    assert lab.fetch(two).owner == "two"
    assert not one.told


async def test_what_a_router_says_of_a_deleted_answer_ends_no_other_one_under_its_key() -> None:
    """It was cut off, and speaks before it hears that its answer was deleted."""
    lab = Lab("one", "two")
    one, two = lab.routers
    lab.keep(one, born="2")
    lab.keeper.take(two, Forget("resp_1", "ann", 3, None, "1"))  # type: ignore[arg-type]
    assert lab.fetch(two).owner == "one" and not one.told
    lab.keeper.take(two, Forget("resp_1", "ann", 3, None, "2"))  # type: ignore[arg-type]
    assert lab.fetch(two) == Fetched(7) and one.told == [Superseded("resp_1", 4)]


async def test_what_is_begun_anew_under_a_key_does_not_go_on_behind_what_was_there() -> None:
    """Its router asked for the former one while nobody could tell."""
    lab = Lab("one", "two")
    one, two = lab.routers
    lab.keep(one, notes=(b"a", b"b"), end=b"end")
    lab.keep(one, head=b"anew", born="2", notes=(b"x", b"y", b"z"))
    assert lab.fetch(two) == Fetched(7, "resp_1", 0, b"anew", (b"x", b"y", b"z"), owner="one", owned=True)
