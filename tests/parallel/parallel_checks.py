"""What all ranks of a group run together in tests of the group and of the broadcast channel."""

from __future__ import annotations

import pytest
import torch

from parallel.channel import BroadcastChannel
from parallel.errors import ChannelClosed, ChannelError
from parallel.exchange import HALF_BYTES
from parallel.group import Group
from parallel.rendezvous import RendezvousAddress

TIMEOUT = 60.0


def all_reduce_sums_in_place(group: Group) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((2, 3), group.rank + 1).to(dtype)
        assert group.all_reduce(x) is x
        assert (x == sum(range(1, group.size + 1))).all()


def all_gather_joins_in_rank_order(group: Group) -> None:
    x = torch.arange(6).reshape(2, 3) + 10 * group.rank
    parts = [torch.arange(6).reshape(2, 3) + 10 * rank for rank in range(group.size)]
    assert torch.equal(group.all_gather(x), torch.cat(parts, -1))
    assert torch.equal(group.all_gather(x, dim=0), torch.cat(parts, 0))
    assert torch.equal(group.all_gather(x.t(), dim=1), torch.cat([part.t() for part in parts], 1))


def broadcast_overwrites_with_the_source(group: Group) -> None:
    for src in range(group.size):
        x = torch.full((4,), float(group.rank))
        assert group.broadcast(x, src) is x
        assert (x == src).all()


def a_transfer_goes_from_one_rank_to_another_and_leaves_the_rest(group: Group) -> None:
    for src in range(group.size):
        for dst in range(group.size):
            x = torch.full((3, 2), float(group.rank))
            assert group.transfer(x, src, dst) is x
            assert (x == (src if group.rank == dst else group.rank)).all(), (src, dst)


def a_chain_of_stages_adds_what_each_has(group: Group) -> None:
    x = torch.ones(5)
    for rank in range(group.size - 1):
        group.transfer(x, rank, rank + 1)
        if group.rank == rank + 1:
            x += 1
    assert x.tolist() == [1.0 + group.rank] * 5


def all_to_all_hands_each_rank_its_rows(group: Group) -> None:
    size, rank = group.size, group.rank
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.tensor([[100 * rank + to, row] for to in range(size) for row in range(3)]).to(dtype)
        expected = torch.tensor([[100 * sender + rank, row] for sender in range(size) for row in range(3)])
        assert torch.equal(group.all_to_all(x), expected.to(dtype))


def all_to_all_takes_other_numbers_of_rows_for_each(group: Group) -> None:
    size, rank = group.size, group.rank
    sent, received = [(rank + 2 * to) % 4 for to in range(size)], [(sender + 2 * rank) % 4 for sender in range(size)]
    x = torch.tensor([[10 * rank + to] * 2 for to in range(size) for _ in range(sent[to])]).view(-1, 2)
    expected = [[10 * sender + rank] * 2 for sender in range(size) for _ in range(received[sender])]
    assert group.all_to_all(x, sent, received).tolist() == expected
    back = group.all_to_all(group.all_to_all(x, sent, received), received, sent)
    assert torch.equal(back, x)


def strided_tensors_are_refused_in_place(group: Group) -> None:
    for collective in (group.all_reduce, group.broadcast):
        with pytest.raises(ValueError, match="contiguous"):
            collective(torch.ones(3, 2).t())


def inference_tensors_work(group: Group) -> None:
    with torch.inference_mode():
        assert group.all_reduce(torch.ones(2)).tolist() == [group.size] * 2


def messages_arrive_whole_whatever_their_size(group: Group) -> None:
    messages = [b"", b"short", b"x" * 64, b"y" * 65, bytes(range(256)) * 1000]
    channel = BroadcastChannel(group, inline_bytes=64)
    if group.rank == 0:
        for message in messages:
            channel.send(message, TIMEOUT)
        channel.close()
        channel.close()
        return
    assert [bytes(channel.receive(TIMEOUT)) for _ in messages] == messages
    with pytest.raises(ChannelClosed):
        channel.receive(TIMEOUT)


def the_wrong_end_is_refused(group: Group) -> None:
    channel = BroadcastChannel(group)
    with pytest.raises(ChannelError, match="only"):
        channel.receive(TIMEOUT) if group.rank == 0 else channel.send(b"", TIMEOUT)


def large_tensors_go_in_several_exchanges(group: Group) -> None:
    count = 2 * HALF_BYTES // 4 + 5
    x = torch.arange(count, dtype=torch.float32).reshape(-1, 1)
    gathered = group.all_gather(x + group.rank)
    assert torch.equal(gathered, torch.cat([x + rank for rank in range(group.size)], -1))
    assert torch.equal(group.all_reduce(x.clone()), x * group.size)
    assert group.all_reduce(torch.empty(0, 4)).shape == (0, 4)


def all_ranks_get_the_same_bits(group: Group) -> None:
    for number in range(20):
        generator = torch.Generator().manual_seed(number * group.size + group.rank)
        x = group.all_reduce(torch.randn(1000, generator=generator).bfloat16())
        for other in group.all_gather(x.view(1, -1), dim=0):
            assert torch.equal(other, x)


def sums_are_torchs_in_rank_order(group: Group) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        each = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) * 8 for rank in range(group.size)]
        each[0][7], each[-1][9], each[0][11] = torch.nan, torch.inf, 3e38
        given = [x.nan_to_num(1, 2, 3) if dtype is torch.int64 else x for x in each]
        expected = given[0].to(dtype)
        for other in given[1:]:
            expected = expected + other.to(dtype)
        found = group.all_reduce(given[group.rank].to(dtype))
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def join_and_wait(rank: int, size: int, address: RendezvousAddress, shared_memory: bool = True) -> None:
    """Join the group, then miss every collective until killed."""
    import signal

    from parallel.torch_group import connect

    with connect(rank, size, address, "cpu", TIMEOUT, shared_memory=shared_memory):
        signal.pause()
