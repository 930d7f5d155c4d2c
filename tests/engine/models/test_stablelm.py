"""StableLM: the norms that each head has of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.layers.base import Build
from engine.layers.norm import EachHeadNorm
from parallel.group import SoloGroup


def norm_of_rank(rank, size, heads, head_dim, order=None, dtype=torch.float32):
    """Return the norm of a rank, whose head h has the weights h + 1, h + 1.1, ..., before it is loaded."""
    group = SoloGroup()
    group.rank, group.size = rank, size
    norm = EachHeadNorm(heads, head_dim, 1e-3, Build(group, dtype, 16), order)
    for head, each in enumerate(norm.norms):
        each.weight.data = head + 1 + torch.arange(head_dim).to(dtype) / 10
    norm.finish_loading()
    return norm


@pytest.mark.parametrize(("heads", "size"), [(4, 1), (4, 2), (2, 4)])
def test_each_rank_norms_its_heads_with_their_own_weights(heads, size):
    x = torch.randn(5, heads, 10)
    expected = torch.stack(
        [F.layer_norm(x[:, head], (10,), head + 1 + torch.arange(10) / 10, eps=1e-3) for head in range(heads)], 1
    )
    count = max(1, heads // size)
    for rank in range(size):
        first = rank * heads // size  # ranks beyond the heads share one
        own = slice(first, first + count)
        found = norm_of_rank(rank, size, heads, 10)(x[:, own].flatten(1))
        torch.testing.assert_close(found, expected[:, own].flatten(1))


def test_weights_follow_the_order_of_features():
    order = [4, 0, 5, 1, 2, 3]
    x = torch.randn(3, 2, 6)
    plain = norm_of_rank(0, 1, 2, 6)(x.flatten(1)).view(3, 2, 6)
    moved = norm_of_rank(0, 1, 2, 6, order)(x[..., order].flatten(1)).view(3, 2, 6)
    torch.testing.assert_close(moved, plain[..., order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype):
    norm = norm_of_rank(0, 1, 3, 10, dtype=dtype)
    x = torch.randn(7, 40).to(dtype)[:, :30]  # strided, of a width that no vector divides
    together = norm(x)
    for row in range(7):
        assert torch.equal(norm(x[row : row + 1]), together[row : row + 1])
