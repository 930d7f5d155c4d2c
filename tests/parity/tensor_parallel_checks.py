"""What every rank of a group of two checks: a sharded layer gives what the plain torch layer gives.

Each rank makes the same full weights from a seed, loads its shards from them and compares.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.base import TorchKernels
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.quantization.select import choose_products
from parallel.group import Group
from parallel.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel.parameter import TensorSource

HIDDEN = 24
TOKENS = 7


def full(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def own_part(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size, -1)[group.rank].contiguous()


def load(layer: ParallelLinear, weight: Tensor, bias: Tensor | None) -> None:
    layer.weight.load(TensorSource(weight))
    if layer.bias is not None and bias is not None:
        layer.bias.load(TensorSource(bias))


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def column(group: Group) -> None:
    x, weight, bias = full(TOKENS, HIDDEN), full(10, HIDDEN), full(10)
    layer = ColumnParallelLinear(HIDDEN, 10, True, group, torch.float32)
    load(layer, weight, bias)
    same(group.all_gather(layer(x)), F.linear(x, weight, bias))


def merged_column(group: Group) -> None:
    x, gate, up = full(TOKENS, HIDDEN), full(10, HIDDEN, seed=1), full(6, HIDDEN, seed=2)
    layer = MergedColumnParallelLinear(HIDDEN, [10, 6], False, group, torch.float32)
    layer.weight.load(TensorSource(gate), 0)
    assert layer.weight.missing == (1,)
    layer.weight.load(TensorSource(up), 1)
    own_gate, own_up = layer(x).split([piece.size for piece in layer.weight.pieces], -1)
    same(group.all_gather(own_gate), F.linear(x, gate))
    same(group.all_gather(own_up), F.linear(x, up))


def row(group: Group) -> None:
    x, weight, bias = full(TOKENS, HIDDEN), full(10, HIDDEN), full(10)
    layer = RowParallelLinear(HIDDEN, 10, True, group, torch.float32)
    load(layer, weight, bias)
    same(layer(own_part(x, group)), F.linear(x, weight, bias))


def row_packed(group: Group) -> None:
    x, weight, bias = full(TOKENS, HIDDEN), full(10, HIDDEN), full(10)
    layer = RowParallelLinear(HIDDEN, 10, True, group, torch.float32)
    load(layer, weight, bias)
    choose_products(layer, TorchKernels())
    assert layer.weight.numel() == 0
    same(layer(own_part(x, group)), F.linear(x, weight, bias))


def qkv(group: Group) -> None:
    _qkv(group, kv_heads=2)


def qkv_replicated(group: Group) -> None:
    _qkv(group, kv_heads=1)


def _qkv(group: Group, kv_heads: int) -> None:
    heads, head_dim = 4, 3
    x = full(TOKENS, HIDDEN)
    weights = [full(count * head_dim, HIDDEN, seed=seed) for seed, count in enumerate((heads, kv_heads, kv_heads))]
    biases = [full(count * head_dim, seed=seed) for seed, count in enumerate((heads, kv_heads, kv_heads))]
    layer = QKVParallelLinear(HIDDEN, heads, kv_heads, head_dim, True, group, torch.float32)
    assert layer.bias is not None
    for part, weight, bias in zip("qkv", weights, biases, strict=True):
        layer.weight.load(TensorSource(weight), part)
        layer.bias.load(TensorSource(bias), part)
    own = layer(x).split([layer.q_size, layer.kv_size, layer.kv_size], -1)
    expected = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    same(group.all_gather(own[0]), expected[0])
    for found, whole in zip(own[1:], expected[1:], strict=True):
        same(found, whole if kv_heads == 1 else own_part(whole, group))


def qkv_fused_conv1d(group: Group) -> None:
    weight, bias = full(HIDDEN, 3 * HIDDEN), full(3 * HIDDEN)
    x = full(TOKENS, HIDDEN)
    layer = QKVParallelLinear(HIDDEN, 4, 4, HIDDEN // 4, True, group, torch.float32)
    assert layer.bias is not None
    layer.weight.load(TensorSource(weight), transposed=True)
    layer.bias.load(TensorSource(bias))
    expected = (x @ weight + bias).chunk(3, -1)
    for found, whole in zip(layer(x).chunk(3, -1), expected, strict=True):
        same(group.all_gather(found), whole)


def row_conv1d(group: Group) -> None:
    x, weight = full(TOKENS, HIDDEN), full(HIDDEN, 10)
    layer = RowParallelLinear(HIDDEN, 10, False, group, torch.float32)
    layer.weight.load(TensorSource(weight), transposed=True)
    same(layer(own_part(x, group)), x @ weight)


def embedding_even(group: Group) -> None:
    _embedding_and_head(group, vocab=32)


def embedding_uneven(group: Group) -> None:
    _embedding_and_head(group, vocab=37)


def embedding_smaller_than_a_shard(group: Group) -> None:
    _embedding_and_head(group, vocab=5)  # rank 1 holds padding only


def _embedding_and_head(group: Group, vocab: int) -> None:
    table, bias = full(vocab, HIDDEN), full(vocab)
    embedding = VocabParallelEmbedding(vocab, HIDDEN, group, torch.float32)
    head = ParallelLMHead(HIDDEN, vocab, True, group, torch.float32)
    assert head.bias is not None
    head.tie_to(embedding)
    embedding.weight.load(TensorSource(table))
    head.bias.load(TensorSource(bias))
    token_ids = torch.arange(vocab)
    assert torch.equal(embedding(token_ids), table)
    same(head(table), F.linear(table, table, bias))
