"""Which sums go over symmetric memory, and that all ranks do without it together when one of them cannot have it."""

from __future__ import annotations

import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel import symmetric
from parallel.group import SoloGroup
from parallel.symmetric import LIMITS, SymmetricGroup, through_symmetric_memory
from tests.engine.thread_group import ThreadGroup, on_ranks

PLACES = {rank: f"host gpu{rank}" for rank in range(9)}


class FakeOneShot:
    """Sums by the group's own gather, in rank order, and counts; fails where it is told to."""

    def __init__(self, group: ThreadGroup, fails: str = "") -> None:
        self.group, self.fails = group, fails
        self.shots: list[int] = []
        self.size = 0
        self.closed = False

    def allocate(self, size):
        self.size = size
        self._fail("allocate")

    def meet(self):
        self._fail("meet")

    def all_reduce(self, x):
        assert x.nbytes <= self.size
        self.shots.append(x.nbytes)
        parts = self.group.all_gather(x.view(1, -1), 0)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        x.copy_(total)
        if self.fails == "sum":
            x += 1
        self._fail("all_reduce")

    def close(self):
        self.closed = True

    def _fail(self, what):
        if self.fails == what:
            raise RuntimeError(f"{what} was refused\nand more")


def form(size, fails=None, places=PLACES, fixed_order=False, act=lambda group, fake: None):
    """Return each rank's group, its fake and what `act` returns there. fails: by rank."""
    store = dist.HashStore()

    def run(inner: ThreadGroup):
        fake = FakeOneShot(inner, (fails or {}).get(inner.rank, ""))
        group = through_symmetric_memory(
            inner, store, fixed_order, make=lambda *_: fake, here=lambda device: places[inner.rank]
        )
        fake.shots.clear()
        return group, fake, act(group, fake)

    return on_ranks(size, run)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_ranks_take_one_shot_for_small_sums_only(size, caplog):
    limit = LIMITS[size]

    def act(group, fake):
        small = group.all_reduce(torch.full((limit // 4,), float(group.rank)))
        assert fake.shots == [limit]
        large = group.all_reduce(torch.full((limit // 4 + 4,), float(group.rank)))
        odd = group.all_reduce(torch.full((3,), float(group.rank)))
        whole = group.all_reduce(torch.full((8,), group.rank))
        group.all_reduce(torch.empty(0))
        assert fake.shots == [limit]
        return {float(each.max()) for each in (small, large, odd, whole)}

    with caplog.at_level(logging.INFO):
        ranks = form(size, act=act)
    assert all(isinstance(group, SymmetricGroup) for group, _, _ in ranks)
    assert [sums for _, _, sums in ranks] == [{size * (size - 1) / 2}] * size
    assert f"one shot over symmetric memory up to {limit >> 10} KiB, nccl beyond" in caplog.text


def test_in_a_fixed_order_large_sums_go_in_pieces():
    limit = LIMITS[4]

    def act(group, fake):
        x = torch.full((4, limit // 4 + 8), 1.0 + group.rank, dtype=torch.bfloat16)
        assert group.all_reduce(x) is x
        assert x.eq(10).all()
        assert group.sums_in_order
        return fake.shots

    shots = [shots for _, _, shots in form(4, fixed_order=True, act=act)]
    assert shots == [[limit, limit, 64]] * 4
    assert not form(4)[0][0].sums_in_order


def test_what_the_kernel_cannot_sum_in_order_is_no_sum():
    def act(group, fake):
        for x in (torch.ones(8, dtype=torch.float16), torch.ones(3)):
            with pytest.raises(ValueError, match="whole 16 bytes of bfloat16 or float32"):
                group.all_reduce(x)

    form(4, fixed_order=True, act=act)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("allocate", "RuntimeError: allocate was refused"),
        ("meet", "RuntimeError: meet was refused"),
        ("all_reduce", "RuntimeError: all_reduce was refused"),
        ("sum", "a trial sum of torch.bfloat16 was wrong"),
    ],
)
def test_one_rank_that_cannot_means_none_does(rank, fails, told, caplog):
    with caplog.at_level(logging.INFO):
        ranks = form(3, {rank: fails})
    assert [type(group) for group, _, _ in ranks] == [ThreadGroup] * 3
    assert all(fake.closed for _, fake, _ in ranks)
    assert caplog.text.count(f"nccl; symmetric memory cannot be used: rank {rank}") == 3
    assert told in caplog.text


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ({0: "a gpu0", 1: "b gpu0"}, "the ranks are on several hosts"),
        ({0: "a gpu0", 1: "a gpu0"}, "two ranks share a GPU"),
    ],
)
def test_ranks_must_be_on_one_host_with_a_gpu_each(places, told, caplog):
    with caplog.at_level(logging.INFO):
        ranks = form(2, places=places)
    assert [type(group) for group, _, _ in ranks] == [ThreadGroup] * 2
    assert caplog.text.count(told) == 2


def test_many_ranks_are_left_to_nccl(caplog):
    with caplog.at_level(logging.INFO):
        ranks = form(9)
    assert all(type(group) is ThreadGroup for group, _, _ in ranks)
    assert "9 ranks are more than the 8" in caplog.text


def test_closing_closes_both():
    ranks = form(2)
    for group, fake, _ in ranks:
        group.close()
        assert fake.closed


@pytest.mark.parametrize("works", [True, False])
def test_a_buffer_that_the_gpu_still_waits_in_is_left_to_it(monkeypatch, caplog, works):
    monkeypatch.setattr(symmetric, "REST_TIMEOUT", 0.05)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    event = SimpleNamespace(record=lambda stream: None, query=lambda: works)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    one_shot = symmetric._TorchOneShot(SoloGroup("cuda:0"), dist.HashStore())
    one_shot._buffer = torch.ones(4)
    buffer = weakref.ref(one_shot._buffer)
    one_shot.close()
    one_shot.close()
    assert (buffer() is None) == works  # freeing it waits for the GPU, with the interpreter's lock held
    assert ("left to it" in caplog.text) != works


def test_torch_has_what_its_own_kernel_is_asked_with():
    schema = torch.ops.symm_mem.one_shot_all_reduce_copy_out.default._schema
    assert [argument.name for argument in schema.arguments] == [
        "symm_buffer", "local_input", "reduce_op", "group_name", "out",
    ]  # fmt: skip
    c10d = torch._C._distributed_c10d
    store = dist.HashStore()
    group = c10d.ProcessGroup(store, 1, 4)
    group._set_group_name("of its own")
    c10d._register_process_group("of its own", group)
    try:
        found = c10d._resolve_process_group("of its own")
        assert (found.rank(), found.size()) == (1, 4)
    finally:
        c10d._unregister_process_group("of its own")
    for name in ("set_group_info", "empty_strided_p2p", "rendezvous"):
        assert hasattr(c10d._SymmetricMemory, name)
    assert not dist.is_initialized()


def test_torchs_own_kernel_is_given_up_by_all_where_its_memory_cannot_be_had(monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    store = dist.HashStore()
    with caplog.at_level(logging.INFO):
        groups = on_ranks(2, lambda inner: through_symmetric_memory(inner, store, here=lambda _: PLACES[inner.rank]))
    assert [type(group) for group in groups] == [ThreadGroup] * 2
    assert caplog.text.count("nccl; symmetric memory cannot be used: rank 0: RuntimeError") == 2
    with pytest.raises(RuntimeError):  # nothing is left in torch's registry
        torch._C._distributed_c10d._resolve_process_group(store.get("name").decode())


def test_older_gpus_are_left_to_nccl(monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    store = dist.HashStore()
    with caplog.at_level(logging.INFO):
        on_ranks(2, lambda inner: through_symmetric_memory(inner, store, here=lambda _: PLACES[inner.rank]))
    assert caplog.text.count("need a GPU of compute capability 8.0") == 2
