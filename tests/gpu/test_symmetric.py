"""Sums over symmetric memory between two GPUs: right, alike on both ranks, and part of a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from parallel.group import Group
from parallel.launcher import launch
from parallel.rendezvous import Rendezvous, RendezvousAddress
from parallel.symmetric import SymmetricGroup
from parallel.torch_group import connect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, torch sees {torch.cuda.device_count()} here"
    ),
]
TIMEOUT = 60.0


def check(group: Group) -> None:
    """What both ranks run; a sum of two has one order, so it must equal torch's to the bit."""
    assert isinstance(group, SymmetricGroup), "the log says why not"
    for dtype in (torch.bfloat16, torch.float32):
        for count in (8, 4096, 100_000 // 8 * 8, 1_000_000):
            parts = [
                torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(group.device, dtype)
                for rank in range(2)
            ]
            x = parts[group.rank].clone()
            assert torch.equal(group.all_reduce(x), parts[0] + parts[1])
    _check_graph(group)
    group.barrier()


def _check_graph(group: Group) -> None:
    x = torch.zeros(4096, dtype=torch.bfloat16, device=group.device)
    stream = torch.cuda.Stream(group.device)
    with torch.cuda.stream(stream):
        group.all_reduce(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            group.all_reduce(x)
    torch.cuda.synchronize(group.device)
    for value in (1, 2, 3):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize(group.device)
        assert x.eq(2 * value).all()


def join(rank: int, address: RendezvousAddress) -> None:
    """Be rank 1."""
    with connect(rank, 2, address, f"cuda:{rank}", TIMEOUT) as group:
        check(group)


def test_two_gpus_sum_in_one_shot():
    with (
        Rendezvous.create() as rendezvous,
        launch(2, join, (rendezvous.address,)) as gang,
        connect(0, 2, rendezvous, "cuda:0", TIMEOUT) as group,
    ):
        check(group)
        assert gang.join(TIMEOUT)
