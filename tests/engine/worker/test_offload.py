"""Tensors whose memory is given back and taken again keep their contents, and whatever shares it with others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.device.host_memory import give_back
from engine.layers.base import Build
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.rope import RopeSpec, Rotary
from engine.worker import offload
from engine.worker.offload import OffloadedWeights, tensors_of
from parallel.group import SoloGroup
from parallel.linear import ColumnParallelLinear, LinearMethod

CPU = torch.device("cpu")


class Quantised(LinearMethod):
    """Whole numbers and a scale per row, as a quantising method keeps them."""

    def __init__(self, weight):
        self.scales = weight.abs().amax(dim=1, keepdim=True) / 127
        self.values = (weight / self.scales).round().to(torch.int8)

    def apply(self, x, bias):
        return x @ (self.values * self.scales).t()


class Model(nn.Module):
    """One of everything that a model keeps."""

    def __init__(self):
        super().__init__()
        group = SoloGroup()
        self.embedding = VocabParallelEmbedding(24, 8, group, torch.float32)
        self.head = ParallelLMHead(8, 24, False, group, torch.float32)
        self.inner = ColumnParallelLinear(8, 8, False, group, torch.float32)
        self.register_buffer("offset", torch.randn(8))
        self.table = Rotary(RopeSpec(10000.0), 8, Build(group, torch.float32, 5))
        for parameter in self.parameters():
            parameter.allocate()
            parameter.data.normal_()
        self.scale = torch.randn(16)[:8]  # an attribute, and a view
        self.head.tie_to(self.embedding)
        self.inner.method = Quantised(self.inner.weight)
        self.inner.release_weight()

    def forward(self, ids):
        hidden = self.inner(self.embedding(ids)) * self.scale + self.offset
        return self.head(hidden + self.table.rows(ids % 5).reshape(len(ids), -1)[:, :8])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().requires_grad_(False)


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
def test_a_model_computes_the_same_after_it_was_offloaded_twice(model, monkeypatch, piece):
    monkeypatch.setattr(offload, "PIECE_BYTES", piece)
    ids = torch.arange(24)
    before, offloaded = model(ids), OffloadedWeights(pinned=False)
    tied = model.embedding.weight
    for _ in range(2):
        total = offloaded.offload(tensors_of(model))
        # embedding and head, padded, once; int8 and scales, table, buffer, and all 16 elements behind the view
        assert total == 4 * 64 * 8 + 8 * 8 + 4 * 8 + 4 * 5 * 8 + 4 * 8 + 4 * 16
        held = [tensor.untyped_storage().nbytes() for tensor in tensors_of(model)]
        assert held == [0] * len(held)
        pieces = [each.data_ptr() for each in offloaded._pieces]
        assert len(pieces) == -(-total // piece)
        offloaded.restore()
        assert torch.equal(model(ids), before)
        assert model.head.weight is model.embedding.weight is tied
    assert [each.data_ptr() for each in offloaded._pieces] == pieces, "the host's memory is taken once"


def test_where_memory_ran_out_all_stays_offloaded(model):
    before, offloaded = model(torch.arange(24)), OffloadedWeights(pinned=False)
    offloaded.offload(tensors_of(model))
    storage, size = offloaded._offloaded[-1]

    class Short:
        """A storage that finds no memory."""

        nbytes = storage.nbytes
        device = storage.device

        def resize_(self, count):
            if count:
                raise torch.OutOfMemoryError("none left")

    offloaded._offloaded[-1] = Short(), size
    with pytest.raises(torch.OutOfMemoryError):
        offloaded.restore()
    held = [tensor.untyped_storage().nbytes() for tensor in tensors_of(model)]
    assert held == [0] * len(held)
    offloaded._offloaded[-1] = storage, size
    offloaded.restore()
    assert torch.equal(model(torch.arange(24)), before)


def test_nothing_to_offload_is_nothing_to_restore():
    offloaded = OffloadedWeights(pinned=False)
    assert offloaded.offload([]) == 0
    offloaded.restore()
    give_back(CPU)


def test_memory_that_numpy_shares_stays_where_it_is():
    shared, own = torch.ones(4), torch.ones(4)
    array, offloaded = shared.numpy(), OffloadedWeights(pinned=False)
    assert offloaded.offload([shared, own]) == 16
    assert array.tolist() == [1.0] * 4
    assert own.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert torch.equal(own, shared)


def test_a_host_without_room_leaves_everything_where_it_is(model, monkeypatch):
    before, offloaded = model(torch.arange(24)), OffloadedWeights(pinned=True)
    monkeypatch.setattr(offload, "PIECE_BYTES", 64)
    empty, taken = torch.empty, []

    def short(*args, pin_memory=False, **more):
        if pin_memory:
            if len(taken) == 3:
                raise RuntimeError("CUDA error: out of memory")
            taken.append(args)
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", short)
    with pytest.raises(MemoryError, match="of the host's memory for the weights: CUDA error"):
        offloaded.offload(tensors_of(model))
    assert torch.equal(model(torch.arange(24)), before)
    assert not offloaded._pieces
