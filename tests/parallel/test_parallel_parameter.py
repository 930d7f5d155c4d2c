"""Parameters read exactly their slice of a checkpoint and say what they miss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.errors import ShardingError
from parallel.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from parallel.parameter import TensorSource, replicated
from tests.parallel.parallel_ranks import FakeGroup


class Spy:
    """A source that counts the elements read from it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.read = 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self.tensor[index]
        self.read += found.numel()
        return found


def qkv(rank: int, size: int, kv_heads: int) -> QKVParallelLinear:
    return QKVParallelLinear(6, 8, kv_heads, 2, False, FakeGroup(rank, size), torch.float32)


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_four_ranks_together_hold_the_projection(kv_heads: int):
    q, k, v = torch.randn(16, 6), torch.randn(2 * kv_heads, 6), torch.randn(2 * kv_heads, 6)
    held: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    for rank in range(4):
        layer = qkv(rank, 4, kv_heads)
        for part, weight in (("q", q), ("k", k), ("v", v)):
            layer.weight.load(TensorSource(weight), part)
        for part, piece in zip("qkv", layer.weight.split([layer.q_size, layer.kv_size, layer.kv_size]), strict=True):
            held[part].append(piece)
    copies = max(1, 4 // kv_heads)
    assert torch.equal(torch.cat(held["q"]), q)
    assert torch.equal(torch.cat(held["k"][::copies]), k)
    assert torch.equal(torch.cat(held["v"][::copies]), v)


def test_each_rank_reads_only_its_slice():
    source = Spy(torch.randn(16, 6))
    ColumnParallelLinear(6, 16, False, FakeGroup(1, 4), torch.float32).weight.load(source)
    assert source.read == 16 * 6 // 4
    source = Spy(torch.randn(10, 16))
    RowParallelLinear(16, 10, False, FakeGroup(1, 4), torch.float32).weight.load(source)
    assert source.read == 16 * 10 // 4
    source = Spy(torch.randn(6, 24))
    layer = QKVParallelLinear(6, 4, 4, 2, False, FakeGroup(1, 2), torch.float32)
    layer.weight.load(source, transposed=True)
    assert source.read == 6 * 24 // 2
    source = Spy(torch.randn(65, 6))
    VocabParallelEmbedding(65, 6, FakeGroup(1, 2), torch.float32).weight.load(source)
    assert source.read == 6  # ids 64 and up; the rest of the rank's share is padding


def test_safetensors_slices_are_sources(tmp_path):
    weight = torch.randn(12, 6)
    save_file({"up": weight}, tmp_path / "model.safetensors")
    layer = ColumnParallelLinear(6, 12, False, FakeGroup(2, 3), torch.bfloat16)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        layer.weight.load(file.get_slice("up"))
    assert torch.equal(layer.weight, weight[8:].bfloat16())


def test_missing_parts_are_told():
    layer = qkv(0, 1, 4)
    assert layer.weight.missing == ("q", "k", "v")
    layer.weight.load(TensorSource(torch.randn(8, 6)), "k")
    assert layer.weight.missing == ("q", "v")
    assert not layer.weight.loaded
    layer.weight.load(TensorSource(torch.randn(32, 6)))
    assert layer.weight.loaded
    norm = replicated([6], torch.float32, torch.device("cpu"))
    assert norm.missing == ("",)
    norm.load(TensorSource(torch.ones(6)))
    assert norm.loaded


@pytest.mark.parametrize(
    ("shape", "part", "transposed", "wanted"),
    [
        ((15, 6), "q", False, r"\(15, 6\).*\(16, 6\)"),
        ((16, 6), "k", False, r"\(16, 6\).*\(8, 6\)"),
        ((16, 6), None, False, r"\(16, 6\).*\(32, 6\)"),
        ((32, 6), None, True, r"\(32, 6\).*\(6, 32\)"),
        ((16,), "q", False, r"\(16,\).*\(16, 6\)"),
    ],
)
def test_a_wrong_shape_is_refused_naming_both(shape, part, transposed, wanted):
    layer = qkv(0, 2, 4)
    with pytest.raises(ValueError, match=wanted):
        layer.weight.load(TensorSource(torch.randn(shape)), part, transposed)
    assert layer.weight.missing == ("q", "k", "v")


def test_an_unknown_part_names_the_known_ones():
    with pytest.raises(KeyError, match="'q', 'k', 'v'"):
        qkv(0, 1, 4).weight.load(TensorSource(torch.randn(8, 6)), "gate")


def test_layers_that_do_not_split_are_refused_before_any_weight_is_read():
    group = FakeGroup(0, 3)
    with pytest.raises(ShardingError, match="num_attention_heads = 8"):
        QKVParallelLinear(6, 8, 8, 2, False, group, torch.float32)
    with pytest.raises(ShardingError, match=r"out_features\[1\] = 10"):
        MergedColumnParallelLinear(6, [9, 10], False, group, torch.float32)
    with pytest.raises(ShardingError, match="in_features = 10"):
        RowParallelLinear(10, 6, False, group, torch.float32)


def test_a_head_cannot_be_tied_to_another_vocabulary():
    group = FakeGroup(0, 1)
    head = ParallelLMHead(6, 30, False, group, torch.float32)
    with pytest.raises(ValueError, match="vocabularies 30 and 31"):
        head.tie_to(VocabParallelEmbedding(31, 6, group, torch.float32))
