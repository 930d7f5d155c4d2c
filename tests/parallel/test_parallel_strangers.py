"""Who is not of a group, on the host or on the network, cannot join it, hold it up, or name what it opens."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from select import select

import psutil
import pytest
import torch

from parallel.errors import ChannelError, RendezvousError
from parallel.group import Group
from parallel.hub import MOST_UNKNOWN, SECRET_BYTES
from parallel.message_ring import SharedMemoryRing
from parallel.rendezvous import Rendezvous, RendezvousAddress
from parallel.shared_memory import NEWBORN, PREFIX, Segment
from parallel.torch_group import connect
from parallel.torch_store import PrivateFolder, TorchStore, hear_only

TIMEOUT = 60.0
HEX = "0123456789abcdef" * 2
linux = pytest.mark.skipif(not Path("/proc").is_dir(), reason="Linux alone filters what a socket hears")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where shared memory lies, in place of what other processes use."""
    monkeypatch.setattr("parallel.shared_memory.shared_folder", lambda: str(tmp_path))
    monkeypatch.setattr("parallel.torch_store.shared_folder", lambda: str(tmp_path))
    return tmp_path


def knock(address: RendezvousAddress, words: bytes = b"") -> socket.socket:
    stranger = socket.create_connection((address.host, address.port), TIMEOUT)
    stranger.sendall(words)
    return stranger


def is_shut(stranger: socket.socket) -> bool:
    """Return whether the other end has hung up, once it has said all that it says to anybody."""
    try:
        while stranger.recv(1024):
            pass
    except ConnectionResetError:
        pass
    return True


def both(rendezvous: Rendezvous, address: RendezvousAddress | None = None) -> list[Group]:
    """Form a group of two threads, rank 0 first."""
    places = [rendezvous, address or rendezvous.address]
    with ThreadPoolExecutor(2) as threads:
        joining = [
            threads.submit(connect, rank, 2, place, "cpu", TIMEOUT, shared_memory=False)
            for rank, place in enumerate(places)
        ]
        return [each.result() for each in joining]


def check(groups: list[Group]) -> None:
    with ThreadPoolExecutor(2) as threads:
        ones = [torch.ones(3) for _ in groups]
        for total in threads.map(lambda group, x: group.all_reduce(x), groups, ones):
            assert total.tolist() == [2.0] * 3
    for group in groups:
        group.close()


@pytest.mark.parametrize(
    "words", [b"", b"\0" * 8, b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), b"\xff" * 100_000], ids=range(5)
)
def test_a_stranger_who_is_first_at_the_port_becomes_no_rank(words):
    with Rendezvous.create() as rendezvous, knock(rendezvous.address, words) as stranger:
        check(both(rendezvous))
        rendezvous.close()
        assert is_shut(stranger)


def test_strangers_who_say_nothing_keep_no_rank_out():
    with Rendezvous.create() as rendezvous:
        strangers = [knock(rendezvous.address) for _ in range(MOST_UNKNOWN + 20)]
        check(both(rendezvous))
        assert is_shut(strangers[0])
        for stranger in strangers:
            stranger.close()


def test_who_does_not_know_the_secret_is_told_so_and_reads_and_writes_nothing():
    with Rendezvous.create() as rendezvous:
        wrong = replace(rendezvous.address, secret=bytes(SECRET_BYTES))
        with pytest.raises(RendezvousError, match="does not know the group's secret"):
            Rendezvous.join(wrong, TIMEOUT)
        with pytest.raises(RendezvousError, match="does not know the group's secret"):
            connect(1, 2, wrong, "cpu", TIMEOUT)
        check(both(rendezvous))


def test_a_rank_believes_nobody_who_answers_in_rank_0s_place():
    """As where the port of a driver that died is another's now."""
    heard = []

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"squadron group 1" + os.urandom(32))
            heard.append(connection.recv(1024))
            connection.sendall(os.urandom(32))
            heard.append(connection.recv(1024))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RendezvousAddress("127.0.0.1", listener.getsockname()[1], os.urandom(SECRET_BYTES))
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with pytest.raises(RendezvousError, match="does not know the group's secret"):
            Rendezvous.join(address, TIMEOUT)
        thread.join(TIMEOUT)
    assert heard[1] == b""
    assert address.secret not in heard[0]


def test_an_answer_that_was_overheard_opens_nothing():
    with Rendezvous.create() as rendezvous:
        with ThreadPoolExecutor(1) as threads, socket.create_server(("127.0.0.1", 0)) as between:
            relayed = replace(rendezvous.address, port=between.getsockname()[1])
            joining = threads.submit(Rendezvous.join, relayed, TIMEOUT)
            caller, _ = between.accept()
            with knock(rendezvous.address) as called:
                caller.sendall(called.recv(1024))
                overheard = caller.recv(1024)
                called.sendall(overheard)
                caller.sendall(called.recv(1024))
                joining.result(TIMEOUT)
            caller.close()
        with knock(rendezvous.address) as again:
            again.recv(1024)
            again.sendall(overheard)
            assert is_shut(again)


def test_no_text_of_an_address_holds_the_secret():
    secret = os.urandom(SECRET_BYTES)
    address = RendezvousAddress("127.0.0.1", 29500, secret)
    for text in (str(address), repr(address), f"{address!r}"):
        assert "29500" in text
        assert repr(secret)[2:10] not in text
        assert secret.hex() not in text


def test_two_groups_never_have_the_same_secret():
    with Rendezvous.create() as one, Rendezvous.create() as other:
        assert one.address.secret != other.address.secret


def test_nothing_listens_once_the_group_is_formed():
    def ports() -> set[int]:
        return {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}

    before = ports()
    rendezvous = Rendezvous.create()
    groups = both(rendezvous)
    assert ports() == before | {rendezvous.address.port}
    del rendezvous
    assert ports() == before
    check(groups)


def test_a_rank_that_comes_twice_does_not_take_its_own_place(caplog):
    with Rendezvous.create() as rendezvous, Rendezvous.join(rendezvous.address, TIMEOUT) as joined:
        callers = {joined.connections("group", 1, 2, TIMEOUT)[0] for _ in range(2)}
        with ExitStack() as stack:
            for connection in callers:
                stack.enter_context(connection)
            (second,), _, _ = select(callers, (), (), TIMEOUT)  # which of them is heard first nobody knows
            assert is_shut(second)
            (first,) = callers - {second}
            first.sendall(b"first")
            (taken,) = rendezvous.connections("group", 0, 2, TIMEOUT)
            with taken:
                assert taken.recv(5) == b"first"
    assert "came twice" in caplog.text


def test_only_who_created_a_rendezvous_is_rank_0():
    with Rendezvous.create() as rendezvous, pytest.raises(RendezvousError, match="rank 0 creates the rendezvous"):
        connect(1, 2, rendezvous, "cpu", TIMEOUT)
    with Rendezvous.create() as rendezvous, pytest.raises(RendezvousError, match="this is rank 0"):
        connect(0, 2, rendezvous.address, "cpu", TIMEOUT)


def test_ranks_at_different_collectives_are_told_so():
    with Rendezvous.create() as rendezvous:
        groups = both(rendezvous)
    with ThreadPoolExecutor(2) as threads:
        summed = threads.submit(groups[0].all_reduce, torch.ones(2))
        joined = threads.submit(groups[1].all_gather, torch.ones(2))
        with pytest.raises(ChannelError, match="out of step"):
            summed.result(TIMEOUT)
        groups[0].close()
        with pytest.raises(ChannelError, match="a peer is gone"):
            joined.result(TIMEOUT)
    groups[1].close()


def test_shared_memory_is_of_its_user_alone_and_nobody_guesses_its_name():
    with Segment.create(64) as one, Segment.create(64) as other:
        facts = one.path.lstat()
        assert (stat.S_IMODE(facts.st_mode), facts.st_uid) == (0o600, os.geteuid())
        names = {one.name.removeprefix(PREFIX), other.name.removeprefix(PREFIX)}
        assert len(names) == 2
        assert all(len(name) == 32 and set(name) <= set(HEX) for name in names)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        f"/dev/shm/{PREFIX}{HEX}",
        f"../{PREFIX}{HEX}",
        f"{PREFIX}{HEX}/x",
        f"{PREFIX}x",
        PREFIX + HEX + "\n",
    ],
)
@pytest.mark.parametrize(
    "attach",
    [Segment.attach, PrivateFolder.attach, lambda name: SharedMemoryRing.attach(name, 0)],
    ids=["segment", "folder", "ring"],
)
def test_a_peer_names_no_path(attach: Callable[[str], object], name: str):
    with pytest.raises(ChannelError, match="is no name of"):
        attach(name)


def a_link(path: Path) -> None:
    target = path.with_name("mine")
    target.write_bytes(b"x" * 4096)
    target.chmod(0o600)
    path.symlink_to(target)


def a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def a_folder(path: Path) -> None:
    path.mkdir(0o700)


def open_to_others(path: Path) -> None:
    path.write_bytes(b"x" * 4096)
    path.chmod(0o640)


def an_empty_file(path: Path) -> None:
    path.touch(0o600)


@pytest.mark.parametrize("make", [a_link, a_pipe, a_folder, open_to_others, an_empty_file])
def test_what_lies_under_the_name_of_shared_memory_and_is_none_is_not_opened(folder, make):
    make(folder / f"{PREFIX}{HEX}")
    with pytest.raises(ChannelError, match=r"is gone|of this user alone"):
        Segment.attach(f"{PREFIX}{HEX}")


def test_another_users_memory_and_folder_are_not_opened(folder, monkeypatch):
    with Segment.create(64) as segment, PrivateFolder.create() as theirs:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(ChannelError, match="not shared memory of this user alone"):
            Segment.attach(segment.name)
        with pytest.raises(ChannelError, match="not a folder of this user alone"):
            PrivateFolder.attach(theirs.name)


def test_a_folder_that_others_may_enter_or_that_is_a_link_is_not_used(folder):
    with PrivateFolder.create() as made:
        made.path.chmod(0o755)
        with pytest.raises(ChannelError, match="not a folder of this user alone"):
            PrivateFolder.attach(made.name)
        made.path.chmod(0o700)
        link = folder / f"squadron-store-{HEX}"
        link.symlink_to(made.path)
        with pytest.raises(ChannelError, match="is not here"):
            PrivateFolder.attach(link.name)


def a_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [a_loop, a_link, a_pipe, a_folder])
@pytest.mark.parametrize("start", [PREFIX, "squadron-store-"])
def test_what_others_leave_in_the_folder_stops_no_start_and_is_left(folder, make, start):
    planted = folder / f"{start}{HEX}x"
    make(planted)
    os.utime(planted, (time.time() - 2 * NEWBORN,) * 2, follow_symlinks=False)
    with Segment.create(64), PrivateFolder.create():
        assert planted.is_symlink() or start != PREFIX or planted.exists()
    assert not (folder / "mine").exists() or (folder / "mine").stat().st_size


def test_the_folder_of_a_killed_driver_is_swept_up_and_that_of_a_live_one_is_not(folder):
    dead = folder / f"squadron-store-{HEX}"
    dead.mkdir(0o700)
    (dead / "store").write_bytes(b"x")
    with PrivateFolder.create() as live:
        for path in (dead, live.path):
            os.utime(path, (time.time() - 2 * NEWBORN,) * 2)
        with PrivateFolder.create():
            assert not dead.exists()
            assert live.path.exists()
    assert not list(folder.iterdir())


@pytest.fixture(params=["one host", "several hosts"])
def stores(request, monkeypatch, folder) -> Iterator[list[TorchStore]]:
    """Both ranks' ends of what torch's groups are made with."""
    if request.param == "several hosts":

        def elsewhere(name: str) -> PrivateFolder:
            raise ChannelError(f"{name} is on another host")

        monkeypatch.setattr(PrivateFolder, "attach", elsewhere)
    with Rendezvous.create() as rendezvous, ThreadPoolExecutor(2) as threads:
        places = [rendezvous, Rendezvous.join(rendezvous.address, TIMEOUT)]
        making = [threads.submit(TorchStore, each, "group", rank, 2, TIMEOUT) for rank, each in enumerate(places)]
        made = [each.result() for each in making]
    assert [each.shares_a_file for each in made] == [request.param == "one host"] * 2
    yield made
    for each in made:
        each.close()
        each.close()


def test_torch_gets_a_store_that_the_ranks_share(stores, folder):
    one, other = (each.view("nccl") for each in stores)
    one.set("id", b"\0secret\xff")
    assert other.get("id") == b"\0secret\xff"
    assert other.timeout == timedelta(seconds=TIMEOUT)
    assert not stores[1].view("symmetric").check(["id"])
    for private in folder.iterdir():
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    for each in stores:
        each.close()
    assert not list(folder.iterdir())
    with pytest.raises(ChannelError, match="closed"):
        one_more = stores[0].view("late")
        assert one_more is None


@linux
@pytest.mark.parametrize(("family", "host", "other"), [(socket.AF_INET, "127.0.0.1", "127.0.0.9")])
def test_a_port_for_torch_hears_the_hosts_of_the_ranks_alone(family, host, other):
    with socket.create_server((host, 0), family=family) as listener:
        hear_only(listener, [host, "192.0.2.7"])
        port = listener.getsockname()[1]
        with socket.create_connection((host, port), TIMEOUT):
            pass
        with pytest.raises(TimeoutError):
            socket.create_connection((host, port), 0.3, source_address=(other, 0))


@linux
def test_a_port_of_the_newer_internet_protocol_hears_alone_whom_it_should():
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no such address")
    with listener:
        port = listener.getsockname()[1]
        hear_only(listener, ["::2", "::1"])
        with socket.create_connection(("::1", port), TIMEOUT):
            pass
        hear_only(listener, ["::2", "2001:db8::1"])
        with pytest.raises(TimeoutError):
            socket.create_connection(("::1", port), 0.3)
