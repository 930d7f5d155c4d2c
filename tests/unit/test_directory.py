"""The register of replicas goes on searching whatever becomes of one search."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from cluster import directory
from cluster.announcement import Announcement
from cluster.directory import ReplicaDirectory
from cluster.link import LinkAddress


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
    monkeypatch.setattr(directory, "RETRY_SECONDS", 0.001)
    replicas = Replicas(end, end)
    register = ReplicaDirectory("router", replicas, SimpleNamespace())
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
    register = ReplicaDirectory("router", replicas, SimpleNamespace(), vocabulary="old")
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
        return OpenLink(replica_id=address.host)

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
