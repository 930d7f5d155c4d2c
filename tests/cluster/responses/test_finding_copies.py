"""A router reads the copies of others as one log, and says that there are none only where all replicas say so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.answer_log import AnswerLog, Kept
from cluster.errors import ApiError
from cluster.responses.copies import NoCopies
from cluster.responses.following import Following
from cluster.responses.record import End, Head, Record, pack_head
from cluster.router import answer_copies
from cluster.router.answer_copies import AnswerCopies
from cluster.token_source import TokenChunk
from cluster.wire.answer_messages import Fetch, Fetched, Forget, Superseded
from cluster.wire.codec import Up
from tests.cluster.ingress.router_lab import LabRouter, RouterLab
from tests.cluster.responses.test_router_deaths import begin, client_of
from tests.simulator.links import connect_local

HEAD = Head("resp_1", "/v1/responses", b"{}", "ann", "1")
OLD, NEW = (0, "router-1"), (1, "router-2")


async def test_a_router_that_has_not_linked_all_replicas_does_not_say_that_a_response_is_gone(tmp_path):
    async with RouterLab(tmp_path, routers=1, pace=0.002) as lab:
        (one,) = lab.routers
        name = await begin(one, max_output_tokens=3000)
        new, replicas = LabRouter(9, lab), lab.replicas
        async with client_of(one) as client:
            lab.replicas = []
            await new.start()
            lab.replicas = replicas
            new.dispatcher.ask_for_links(lambda: True, lambda: len(new.dispatcher.linked) == len(replicas))
            statuses, unknown = [], []
            for replica in replicas:
                new.dispatcher.add_link(await connect_local(replica.serve, new.name))
                async with client_of(new) as other:
                    statuses.append((await other.get(f"/v1/responses/{name}")).status_code)
                    unknown.append((await other.get("/v1/responses/resp_1")).status_code)
            assert set(statuses) <= {200, 503} and statuses[-1] == 200
            assert unknown == [503, 503, 404]
            await client.delete(f"/v1/responses/{name}")
        await new.kill()


async def test_where_some_replicas_are_silent_a_response_is_not_said_to_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_copies, "PATIENCE", 0.05)
    async with RouterLab(tmp_path, pace=0.002) as lab:
        two = lab.routers[1]
        silent, send = two.dispatcher.linked[:2], two.dispatcher.send
        monkeypatch.setattr(two.dispatcher, "send", lambda to, said: None if to in silent else send(to, said))
        async with client_of(two) as client:
            for ask in (client.get, client.delete):
                answer = await ask("/v1/responses/resp_1")
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "no_replica"


def note_of(*tokens: int) -> bytes:
    log = AnswerLog()
    log.add(0, TokenChunk(0, tokens))
    return log.take() or b""


class TwoLogs(NoCopies):
    """What is kept while another router, which is behind, goes on with an answer."""

    def __init__(self) -> None:
        self.whole = [Record(HEAD, [note_of(0, 1)], None, NEW[0], owner=NEW[1])]
        end = End(0)
        self.told = [
            Record(HEAD, [], None, NEW[0], owner=NEW[1]),
            Record(HEAD, [note_of(2, 3)], None, NEW[0], owner=NEW[1]),
            Record(HEAD, [note_of(4, 5)], end, NEW[0], owner=NEW[1]),
        ]

    async def fetch(self, name: str, tenant: str | None) -> Record | None:
        return self.whole.pop()

    async def news(self, record: Record, known: int, wait: float) -> Record | None:
        return self.told.pop(0)


async def test_who_follows_an_answer_into_another_log_gets_each_token_once():
    kept = Kept(HEAD.name)
    former = Record(HEAD, [note_of(0, 1, 2, 3)], None, OLD[0], owner=OLD[1])
    following = Following(former, TwoLogs(), kept, lambda: None)
    assert [token async for _, chunk in following.coming() for token in chunk.token_ids] == [4, 5]


class Replica:
    """One that a router is linked to."""

    replica_id = "a"


class Pages:
    """A dispatcher with one replica, whose copy is another router's from the second page on."""

    reaches_all = True

    def __init__(self, same_epoch: bool) -> None:
        self.linked: list[Any] = [Replica()]
        self.new = (OLD[0], NEW[1]) if same_epoch else NEW
        self.asked = 0

    def hold_copies(self, on_message: Any, on_linked: Any) -> None:
        self.tell = on_message

    def send(self, replica: Any, said: Up) -> None:
        assert isinstance(said, Fetch)
        self.asked += 1
        head = b"" if said.known else pack_head(HEAD)
        version, notes, more = (OLD, (b"old",), True) if self.asked == 1 else (self.new, (b"a", b"b"), False)
        fetched = Fetched(said.ticket, said.name, version[0], head, notes[said.known :], b"", more, version[1])
        self.tell(replica, fetched)


@pytest.mark.parametrize("same_epoch", [True, False])
async def test_pages_of_two_logs_are_not_joined(same_epoch):
    pages: Any = Pages(same_epoch)
    found = await AnswerCopies([pages], 60.0).fetch(HEAD.name, "ann")
    assert found is not None
    assert (found.version, found.notes) == (pages.new, [b"a", b"b"])


class Keepers:
    """A dispatcher with some replicas, which remember what they are told."""

    reaches_all = True

    def __init__(self, count: int) -> None:
        self.linked = [Named(number) for number in range(count)]

    def hold_copies(self, on_message: Any, on_linked: Any) -> None:
        self.tell, self.link = on_message, on_linked

    def send(self, replica: Any, said: Up) -> None:
        replica.told.append(said)
        if isinstance(said, Fetch):
            self.tell(replica, Fetched(said.ticket))


class Named:
    """A replica that a router is linked to."""

    draining = False

    def __init__(self, number: int) -> None:
        self.replica_id = f"replica-{number}"
        self.told: list[Up] = []


async def test_a_home_without_room_is_replaced_and_the_copies_of_a_dropped_answer_are_taken_back(monkeypatch):
    monkeypatch.setattr(answer_copies, "PAUSE", 0.0)
    keepers: Any = Keepers(3)
    copies = AnswerCopies([keepers], 60.0)
    copies.put(Record(HEAD, [note_of(0)]))
    while not (homes := [one for one in keepers.linked if one.told]):
        await asyncio.sleep(0)
    (third,) = set(keepers.linked) - set(homes)
    full, home = homes
    keepers.tell(full, Superseded(HEAD.name, 0, full=True))
    while not third.told:
        await asyncio.sleep(0)
    assert third.told == home.told
    copies.drop(HEAD.name)
    assert [one.told[-1] for one in (home, third)] == [Forget(HEAD.name, HEAD.tenant, 0)] * 2
    assert len(full.told) == 1
    copies.close()


@pytest.mark.parametrize("ago", [1.0, 2 * answer_copies.CALM])
async def test_an_unknown_response_is_not_there_once_it_is_long_that_replicas_have_gone(ago):
    keepers: Any = Keepers(3)
    copies = AnswerCopies([keepers], 60.0)
    keepers.link(keepers.linked[0])
    for gone in keepers.linked[:2]:
        gone.gone_at = asyncio.get_running_loop().time() - ago
    del keepers.linked[:2]
    if ago < answer_copies.CALM:
        with pytest.raises(ApiError, match="ask again"):
            await copies.fetch(HEAD.name, HEAD.tenant)
    else:
        assert await copies.fetch(HEAD.name, HEAD.tenant) is None
