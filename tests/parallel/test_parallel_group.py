"""Groups of real processes: collectives, rendezvous, deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel.channel import BroadcastChannel
from parallel.errors import ChannelError, ChannelTimeout, RendezvousError
from parallel.exchange import HALF_BYTES
from parallel.group import Group, SoloGroup
from parallel.host_group import HostGroup, StarGroup
from parallel.hub import SECRET_BYTES
from parallel.launcher import LocalWorkerGroup, launch
from parallel.rendezvous import Rendezvous, RendezvousAddress
from parallel.shared_memory import Fence, Segment, SharedWord, wait_for_change
from parallel.torch_group import TorchGroup, connect
from tests.parallel import parallel_checks as checks
from tests.parallel.parallel_ranks import Crew, FakeGroup, crew

TIMEOUT = 60.0
SECRET = bytes(SECRET_BYTES)
WORDS = 64  # bytes before a segment's halves


@pytest.fixture(scope="module", params=["memory", "python", "mixed"])
def trio(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Three ranks that share memory, in C, in Python or both."""
    with crew(3, request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def distant_pair() -> Iterator[Crew]:
    """Two ranks that use sockets for everything, as if they were on two hosts."""
    with crew(2, "sockets") as ranks:
        yield ranks


@pytest.fixture(scope="module", params=[2, 4])
def torchs(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Ranks over torch's process group, gloo's in the place of NCCL's, which are called alike."""
    with crew(request.param, "torch") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Crew]:
    """Four ranks that share memory."""
    with crew(4) as ranks:
        yield ranks


BETWEEN_TWO = [
    checks.a_transfer_goes_from_one_rank_to_another_and_leaves_the_rest,
    checks.a_chain_of_stages_adds_what_each_has,
    checks.all_to_all_hands_each_rank_its_rows,
    checks.all_to_all_takes_other_numbers_of_rows_for_each,
]
CHECKS = [
    *BETWEEN_TWO,
    checks.all_reduce_sums_in_place,
    checks.all_gather_joins_in_rank_order,
    checks.broadcast_overwrites_with_the_source,
    checks.strided_tensors_are_refused_in_place,
    checks.inference_tensors_work,
    checks.large_tensors_go_in_several_exchanges,
    checks.messages_arrive_whole_whatever_their_size,
    checks.the_wrong_end_is_refused,
]


@pytest.mark.parametrize("check", [*CHECKS, checks.all_ranks_get_the_same_bits, checks.sums_are_torchs_in_rank_order])
def test_three_ranks_of_one_host(trio: Crew, check: Callable[[Group], None]) -> None:
    assert isinstance(trio.group, HostGroup)
    trio.run(check)


@pytest.mark.parametrize("check", CHECKS)
def test_two_distant_ranks(distant_pair: Crew, check: Callable[[Group], None]) -> None:
    assert isinstance(distant_pair.group, StarGroup)
    distant_pair.run(check)


@pytest.mark.parametrize("check", BETWEEN_TWO)
def test_four_ranks_of_one_host(four: Crew, check: Callable[[Group], None]) -> None:
    four.run(check)


@pytest.mark.parametrize(
    "check", [*BETWEEN_TWO, checks.all_reduce_sums_in_place, checks.broadcast_overwrites_with_the_source]
)
def test_ranks_over_torchs_process_group(torchs: Crew, check: Callable[[Group], None]) -> None:
    assert isinstance(torchs.group, TorchGroup)
    torchs.run(check)


def test_a_word_is_published_after_what_came_before_and_read_before_what_follows(monkeypatch):
    with Segment.create(64) as segment:
        word, raw = SharedWord(segment.memory, 0), memoryview(segment.memory).cast("I")
        found = []

        def at_the_fence(fence: Fence) -> None:
            found.append(raw[0])
            raw[0] = 7

        monkeypatch.setattr(Fence, "pass_through", at_the_fence, raising=False)
        raw[0] = 5
        word.publish(6)
        assert (found, raw[0]) == ([5], 6)  # the barrier came first
        assert word.value == 6
        assert (found, raw[0]) == ([5, 6], 7)  # the barrier came last


def test_who_looks_at_a_word_passes_a_barrier_once_it_has_changed(monkeypatch):
    """Looks are what an exchange waits with: each would cost far more with a barrier."""
    barriers = []
    with Segment.create(64) as segment:
        word, raw = SharedWord(segment.memory, 0), memoryview(segment.memory).cast("I")
        monkeypatch.setattr(Fence, "pass_through", lambda fence: barriers.append(raw[0]))
        with pytest.raises(ChannelTimeout):
            wait_for_change(word, 0, 0.01, time.monotonic() + 0.02, lambda: None)
        assert not barriers
        raw[0] = 3
        wait_for_change(word, 0, 0.01, None, lambda: None)
        assert barriers == [3]


def test_an_exchange_is_right_where_bytes_are_seen_after_the_word_that_tells_of_them(monkeypatch):
    """As on Arm: the peer's word is there, and the bytes that it wrote before only beyond a barrier."""
    theirs = torch.arange(3, dtype=torch.float32)
    sign = len(theirs) << 8 | theirs.element_size() << 2  # as the peer writes it for a sum
    with Segment.create(WORDS + 2 * HALF_BYTES) as own, Segment.create(WORDS + 2 * HALF_BYTES) as peer:
        late = memoryview(peer.memory)

        def at_the_fence(fence: Fence) -> None:
            if late[0] == 0:  # the peer's first exchange: its word comes into sight
                late[0] = 1
                return
            late[40:48] = sign.to_bytes(8, "little")
            start = WORDS + HALF_BYTES
            late[start : start + theirs.nbytes] = theirs.numpy().tobytes()

        monkeypatch.setattr(Fence, "pass_through", at_the_fence, raising=False)
        group = HostGroup(FakeGroup(0, 2), (own, peer), timeout=1.0)
        assert group.all_reduce(torch.ones(3)).tolist() == [1.0, 2.0, 3.0]


def test_ranks_that_share_no_memory_use_sockets(monkeypatch):
    def elsewhere(name: str) -> Segment:
        raise ChannelError(f"{name} is on another host")

    monkeypatch.setattr(Segment, "attach", elsewhere)
    groups: dict[int, Group] = {}

    def join(rank: int, where: Rendezvous | RendezvousAddress) -> None:
        groups[rank] = connect(rank, 2, where, "cpu", TIMEOUT)

    with Rendezvous.create() as rendezvous:
        other = threading.Thread(target=join, args=(1, rendezvous.address))
        other.start()
        join(0, rendezvous)
        other.join(TIMEOUT)
        assert [type(groups[rank]) for rank in (0, 1)] == [StarGroup, StarGroup]
        for group in groups.values():
            group.close()


def test_no_default_group_is_made(trio: Crew):
    assert not dist.is_initialized()


def test_a_group_of_one_does_nothing():
    group = connect(0, 1, None, "cpu", TIMEOUT)
    assert isinstance(group, SoloGroup)
    x = torch.ones(2, 3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.broadcast(x) is x
    assert group.transfer(x, 0, 0) is x
    assert group.all_to_all(x) is x
    group.barrier()
    group.close()


@contextmanager
def beside_a_rank_that_hangs(shared_memory: bool, limit: float) -> Iterator[tuple[Group, LocalWorkerGroup]]:
    with (
        Rendezvous.create() as rendezvous,
        launch(2, checks.join_and_wait, (2, rendezvous.address, shared_memory)) as gang,
        connect(0, 2, rendezvous, "cpu", TIMEOUT, limit, shared_memory=shared_memory) as group,
    ):
        yield group, gang


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_hung_rank_misses_the_deadline(shared_memory: bool):
    with beside_a_rank_that_hangs(shared_memory, limit=0.2) as (group, _):
        with pytest.raises(ChannelTimeout, match=r"missed (its|the) deadline"):
            group.all_reduce(torch.ones(1))
        group.close()
        for collective in (group.all_reduce, group.all_gather, group.broadcast):
            with pytest.raises(ChannelError, match="closed"):
                collective(torch.ones(1))


def test_a_dead_rank_ends_the_group_long_before_the_deadline():
    with beside_a_rank_that_hangs(shared_memory=True, limit=TIMEOUT) as (group, gang):
        threading.Timer(0.1, gang.kill).start()
        began = time.monotonic()
        with pytest.raises(ChannelError, match="rank 1 is gone"):
            group.all_reduce(torch.ones(1))
        assert time.monotonic() - began < TIMEOUT / 2
        with pytest.raises(ChannelError, match="a peer is gone"):
            group.broadcast(torch.ones(1), src=1, timeout=float("inf"))
        BroadcastChannel(group).close()  # nobody is left to be told, which is no error


class QueueingProcessGroup:
    """As NCCL's: a collective is queued with the group's deadline of that moment, whatever its options say."""

    def __init__(self) -> None:
        self.limit = 300.0
        self.queued: list[float] = []

    def _set_default_timeout(self, limit: timedelta) -> None:
        self.limit = limit.total_seconds()

    def broadcast(self, tensors, options) -> QueueingProcessGroup:
        self.queued.append(self.limit)
        return self

    def wait(self) -> None:
        """Only the device waits."""


def test_on_a_gpu_a_broadcast_with_a_deadline_of_its_own_has_it_and_is_waited_for(monkeypatch):
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    queue = QueueingProcessGroup()
    group = TorchGroup(queue, 0, 2, torch.device("cuda:0"), limit=300.0)
    group.limit(30.0)
    group.broadcast(torch.ones(1))
    assert not waited
    group.broadcast(torch.ones(1), src=1, timeout=300.0)
    assert waited  # or what is queued next would have waited for a rank that is late, with a step's deadline
    group.broadcast(torch.ones(1))
    assert queue.queued == [30.0, 300.0, 30.0]


def test_the_end_of_a_group_on_gpus_waits_for_no_peer_and_not_long_for_nccl(monkeypatch, caplog):
    monkeypatch.setattr("parallel.torch_group.ABORT_TIMEOUT", 0.05)
    released = threading.Event()
    # Its shutdown, which is not there, would wait for all that is queued and for the other ranks.
    stuck = SimpleNamespace(abort=lambda: released.wait(TIMEOUT))
    group = TorchGroup(stuck, 0, 2, torch.device("cuda:0"))
    group.close()
    group.close()
    assert "did not let go" in caplog.text
    released.set()


def test_ranks_that_do_not_come_are_told_in_time():
    with Rendezvous.create() as rendezvous, pytest.raises(RendezvousError, match=r"rank 0 of 2 .* within 0\.3 s"):
        connect(0, 2, rendezvous, "cpu", 0.3)


def test_an_absent_rank_0_is_told_in_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RendezvousError, match=rf"no rank 0 answers at 127\.0\.0\.1:{port} after 0\.1 s"):
        connect(1, 2, RendezvousAddress("127.0.0.1", port, SECRET), "cpu", 0.1)


@pytest.mark.parametrize(
    ("host", "port", "secret"),
    [("", 80, SECRET), ("localhost", 0, SECRET), ("localhost", 1 << 16, SECRET), ("localhost", 80, b"short")],
)
def test_a_malformed_address_is_refused(host: str, port: int, secret: bytes):
    with pytest.raises(RendezvousError, match=r"127\.0\.0\.1:29500, and a secret of 32 bytes") as refused:
        RendezvousAddress(host, port, secret)
    assert "short" not in str(refused.value)


def test_a_rank_outside_the_group_and_a_missing_address_are_refused():
    with pytest.raises(ValueError, match="rank must be 0 to 1 in a group of 2, not 2"):
        connect(2, 2, RendezvousAddress("127.0.0.1", 1, SECRET), "cpu", 0.1)
    with pytest.raises(RendezvousError, match="needs the address"):
        connect(0, 2, None, "cpu", 0.1)


def test_the_store_listens_on_its_own_address_only_and_every_store_has_its_own_port():
    with Rendezvous.create() as first, Rendezvous.create() as second:
        assert first.address != second.address
        port = first.address.port
        with socket.create_connection(("127.0.0.1", port), TIMEOUT):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), TIMEOUT)


def test_a_host_that_is_not_ours_is_refused():
    with pytest.raises(RendezvousError, match="give an address of this machine"):
        Rendezvous.create("192.0.2.1")
    closed = Rendezvous.create()
    closed.close()
    with pytest.raises(RendezvousError, match="is closed"):
        connect(0, 2, closed, "cpu", 0.1)
