"""The register of replicas goes on searching whatever becomes of one search."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from cluster.lifecycle import leases
from cluster.router import directory
from cluster.router.directory import ReplicaDirectory
from cluster.wire.link import Announcement, LinkAddress, LinkRefusedError, OtherProtocolError
from tests.cluster.cluster_lab import until


class Lease:
    """A lease call that ends in one way, or finds a replica."""

    def __init__(self, end: BaseException | Announcement | None) -> None:
        self._end = end
        self.cancelled = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._end is None:
            await asyncio.Event().wait()
        if isinstance(self._end, Announcement):
            return self._end
        if isinstance(self._end, asyncio.CancelledError):
            waited_for = asyncio.get_running_loop().create_future()
            waited_for.cancel()
            await waited_for
        raise self._end

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """A deployment handle: hands out the leases it was given, then one that stays open."""

    def __init__(self, *ends: BaseException | Announcement) -> None:
        self.leases = [Lease(end) for end in ends] + [Lease(None)]
        self.asked = 0
        self.lease = SimpleNamespace(remote=self._ask)
        self.all_asked = asyncio.Event()

    def options(self, stream: bool):
        assert stream
        return self

    def _ask(self, *_, watch):
        lease = self.leases[self.asked]
        self.asked += 1
        if self.asked == len(self.leases):
            self.all_asked.set()
        return lease


ENDS = [RuntimeError("the replica has died"), asyncio.CancelledError(), StopAsyncIteration()]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
async def test_a_search_that_ends_with_its_replica_is_followed_by_another(end, monkeypatch):
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(directory, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(leases, "RETRY_SECONDS", 0.001)
    replicas = Replicas(end, end)
    register = ReplicaDirectory("router", replicas, Links())
    async with asyncio.timeout(5):
        await replicas.all_asked.wait()
    assert [lease.cancelled for lease in replicas.leases] == [True, True, False]
    (search,) = register._tasks
    search.cancel()
    with pytest.raises(asyncio.CancelledError):
        await search


async def test_a_replica_that_speaks_other_tokens_is_given_back_and_never_linked(monkeypatch):
    """In a rolling update routers of the old model meet replicas of the new one."""
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(directory, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    linked: list[LinkAddress] = []

    async def connect(address: LinkAddress, _: str) -> None:
        linked.append(address)
        raise directory.LinkError("no link in this test")

    monkeypatch.setattr(directory, "connect", connect)
    found = [
        Announcement(name, LinkAddress("127.0.0.1", port, "secret"), {}, 1, (1,), vocabulary)
        for name, port, vocabulary in (("theirs", 1, "new"), ("ours", 2, "old"))
    ]
    replicas = Replicas(*found)
    register = ReplicaDirectory("router", replicas, Links(), vocabulary="old")
    async with asyncio.timeout(5):
        await replicas.all_asked.wait()
        while not linked:
            await asyncio.sleep(0)
    assert [address.port for address in linked] == [2]
    assert replicas.leases[0].cancelled
    assert "theirs" in register._watch.known, "it would be leased again and again"
    for task in list(register._tasks):
        task.cancel()
    await asyncio.gather(*register._tasks, return_exceptions=True)


class Links:
    """A dispatcher's part in this: what it was given, and what it was told to let go."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.removed: list[str] = []

    def add_link(self, link) -> None:
        self.added.append(link.replica_id)

    def remove_replica(self, replica_id: str) -> None:
        self.removed.append(replica_id)

    def call_when_leaving(self, tell) -> None:
        self.say_to_go = tell

    def ask_for_links(self, has_all, reaches_all) -> None:
        self.has_all, self.reaches_all = has_all, reaches_all


class OpenLink(SimpleNamespace):
    """A link that holds."""

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()

    def close(self, *_) -> None:
        return


@pytest.fixture
async def change(monkeypatch):
    """Has Serve's set become so many replicas, whose vocabularies are told; returns what the dispatcher knows."""
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(directory, "ray", SimpleNamespace(get_runtime_context=lambda: context))

    async def connect(address: LinkAddress, _: str) -> OpenLink:
        return OpenLink(replica_id=address.host, welcome=SimpleNamespace(draining=False))

    monkeypatch.setattr(directory, "connect", connect)
    links = Links()
    register = ReplicaDirectory("router", Replicas(), links, vocabulary="ours")
    await asyncio.sleep(0)

    async def become(*replicas: str, linked: str = "") -> Links:
        register._members_changed(frozenset(replicas))
        if linked:
            found = Announcement(linked, LinkAddress(linked, 1, "secret"), {}, 1, (1,), "ours")
            register._spawn(register._hold(found, Lease(None)))
            async with asyncio.timeout(5):
                while linked not in links.added:
                    await asyncio.sleep(0)
        return links

    yield become
    for task in list(register._tasks):
        task.cancel()
    await asyncio.gather(*register._tasks, return_exceptions=True)


async def test_it_is_known_whether_all_replicas_are_linked(change):
    links = await change("a", "b", linked="a")
    assert not links.has_all()
    await change("a", "b", linked="b")
    assert links.has_all()
    await change("a", "b", "c")
    assert not links.has_all()
    await change("a")
    assert links.has_all()


async def test_a_replica_that_serve_takes_out_gets_nothing_new_while_another_is_linked(change):
    await change("a", "b", linked="a")
    links = await change("a", "b", linked="b")
    await change("b")
    assert links.removed == ["a"]
    await change()
    assert links.removed == ["a", "b"], "where none is wanted none is kept"


async def test_the_last_replica_of_this_vocabulary_serves_on_until_another_is_linked(change):
    """In an update to another tokenizer Serve may stop it before the new router serves."""
    links = await change("a", linked="a")
    await change("a", "theirs")
    await change("theirs")
    assert links.removed == []
    await change("theirs", "b", linked="b")
    assert links.removed == ["a"]
    await change("theirs")
    await change()
    assert "b" in links.removed, "an empty set may wait for its place"


async def test_a_replica_that_says_it_is_to_go_gets_nothing_new_before_serve_says_so(change):
    await change("a", "b", linked="a")
    links = await change("a", "b", linked="b")
    links.say_to_go("a", False)
    assert links.removed == ["a"]
    links.say_to_go("b", False)
    assert links.removed == ["a", "b"], "where all are to go none is kept"


async def test_the_last_replica_whose_node_ends_serves_on_until_another_is_linked(change):
    """Nobody who comes after needs its place; Serve stops it as soon as it hears of the drain."""
    links = await change("a", linked="a")
    links.say_to_go("a", True)
    await change()
    assert links.removed == []
    await change("b")
    assert links.removed == []
    await change("b", linked="b")
    assert links.removed == ["a"]


async def test_the_last_of_this_vocabulary_that_says_it_is_to_go_serves_on_until_another_is_linked(change):
    links = await change("a", linked="a")
    await change("a", "theirs")
    links.say_to_go("a", False)
    await change("theirs")
    assert links.removed == []
    await change("theirs", "b", linked="b")
    assert links.removed == ["a"]


async def test_a_replica_that_is_to_go_is_not_found_again(on_this_node, monkeypatch):
    links: list[OpenLink] = []

    async def connect(address: LinkAddress, _: str) -> OpenLink:
        links.append(OpenLink(replica_id="a", welcome=SimpleNamespace(draining=True)))
        return links[-1]

    monkeypatch.setattr(directory, "connect", connect)
    replicas, dispatcher = OneReplica(), Links()
    register = ReplicaDirectory("router", replicas, dispatcher)
    register._members_changed(frozenset("a"))
    await until(lambda: bool(links))
    await asyncio.sleep(0.1)  # ten times the pause between two tries
    assert (len(links), dispatcher.added) == (1, [])
    register._members_changed(frozenset())
    assert register._watch.known == set()
    await register.close()


async def test_replicas_of_another_vocabulary_are_forgotten_once_they_are_gone(monkeypatch):
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(directory, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    found = [Announcement(name, LinkAddress("127.0.0.1", 1, "s"), {}, 1, (1,), "new") for name in ("a", "b")]
    replicas = Replicas(*found)
    register = ReplicaDirectory("router", replicas, Links(), vocabulary="old")
    register._members_changed(frozenset("ab"))
    async with asyncio.timeout(5):
        await replicas.all_asked.wait()
    register._members_changed(frozenset("b"))
    assert register._watch.known == {"b"}
    for task in list(register._tasks):
        task.cancel()
    await asyncio.gather(*register._tasks, return_exceptions=True)


@pytest.fixture
def on_this_node(monkeypatch):
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(directory, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(directory, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(leases, "RETRY_SECONDS", 0.01)


class Queue(Links):
    """A dispatcher with so many requests that wait for a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.tell = lambda: None

    def call_when_waiting(self, tell) -> None:
        self.tell = tell

    def queue(self):
        return SimpleNamespace(requests=self.waiting)


@pytest.mark.parametrize("why", ["a request waits", "there are replicas"])
async def test_a_new_router_leaves_a_deployment_asleep_until_it_has_a_reason(on_this_node, why):
    """A call that is pending would have Serve start a replica."""
    replicas, dispatcher, present = Replicas(), Queue(), []
    register = ReplicaDirectory("router", replicas, dispatcher, on_demand=True, rouse=lambda: bool(present))
    await asyncio.sleep(0.05)  # some looks
    assert replicas.asked == 0
    if why == "there are replicas":
        present.append("a")
    else:
        dispatcher.waiting = 1
        dispatcher.tell()
    async with asyncio.timeout(5):
        await replicas.all_asked.wait()
    await register.close()


def refusing(monkeypatch, error: Exception) -> list[LinkAddress]:
    """Have each link refused so; returns the tries."""
    tried: list[LinkAddress] = []

    async def connect(address: LinkAddress, _: str) -> None:
        tried.append(address)
        raise error

    monkeypatch.setattr(directory, "connect", connect)
    return tried


def found(name: str) -> Announcement:
    return Announcement(name, LinkAddress("127.0.0.1", 1, "secret"), {}, 1, (1,))


async def test_a_replica_of_another_protocol_is_tried_once_and_said_once(on_this_node, monkeypatch, caplog):
    tried = refusing(monkeypatch, OtherProtocolError("this replica speaks link protocol 7, the router 8"))
    replicas = Replicas(found("old"))
    links = Links()
    register = ReplicaDirectory("router", replicas, links)
    register._members_changed(frozenset(["old"]))
    async with asyncio.timeout(5):
        await replicas.all_asked.wait()
    await asyncio.sleep(0.1)  # ten times the pause between two tries
    assert (len(tried), replicas.asked) == (1, 2)
    assert register._watch.known == {"old"}, "it would be leased again and again"
    assert register.unlinked == {"old": "this replica speaks link protocol 7, the router 8"}
    assert caplog.text.count("no link to replica old: this replica speaks link protocol 7, the router 8") == 1
    assert links.has_all() and not links.reaches_all(), "what it keeps is not known here"
    register._members_changed(frozenset())
    assert (register._watch.known, register.unlinked) == (set(), {})
    await register.close()


class OneReplica(Replicas):
    """A deployment of one replica, which goes to whoever does not know it."""

    def _ask(self, *_, watch):
        class Unknown(Lease):
            async def __anext__(self):
                while "a" in watch.known:
                    await asyncio.sleep(0)
                return found("a")

        return Unknown(None)


async def test_a_replica_that_takes_no_link_is_tried_ever_less_often_and_said_once(on_this_node, monkeypatch, caplog):
    tried = refusing(monkeypatch, LinkRefusedError("nobody there"))
    monkeypatch.setattr(directory, "MOST_RETRY_SECONDS", 0.05)
    replicas, pauses = OneReplica(), []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def noted(seconds: float, act, *args):
        if act == register._forget:
            pauses.append(seconds)
        return call_later(seconds, act, *args)

    monkeypatch.setattr(loop, "call_later", noted)
    register = ReplicaDirectory("router", replicas, Links())
    register._members_changed(frozenset("a"))
    async with asyncio.timeout(5):
        while len(pauses) < 8:
            await asyncio.sleep(0)
    assert pauses == [0.02, 0.04] + [0.05] * 6
    assert len(tried) == 8
    assert register.unlinked == {"a": "nobody there"}
    assert caplog.text.count("no link to replica a: nobody there") == 1
    await register.close()
