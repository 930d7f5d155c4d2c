"""Embeddings of tokens and positions, and the output head; the vocabulary is split over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.base import Build
from parallel.group import Group
from parallel.linear import ParallelLinear
from parallel.parameter import ShardedParameter, replicated
from parallel.sharding import padded_vocab, vocab_pieces, vocab_range

# Draws look at runs of this many ids, which no share of the vocabulary may cut.
ROW_MULTIPLE = 64


class VocabParallelEmbedding(nn.Module):
    """Embedding table with its rows split by token id; a vocabulary that does not divide evenly is padded."""

    weight: ShardedParameter

    def __init__(self, vocab_size: int, hidden_size: int, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        self.weight = _vocab_parameter(vocab_size, (hidden_size,), group, dtype)  # [vocab_per_rank, hidden]
        self.start, self.stop = vocab_range(vocab_size, group.rank, group.size, ROW_MULTIPLE)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings on every rank: [num_tokens] -> [num_tokens, hidden]."""
        return self.gather(token_ids, lambda own: F.embedding(own, self.weight))

    def gather(self, token_ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings on every rank. look_up: row numbers of this rank's table -> embeddings."""
        if self.group.size == 1:
            return look_up(token_ids)
        elsewhere = (token_ids < self.start) | (token_ids >= self.stop)
        rows = look_up((token_ids - self.start).masked_fill(elsewhere, 0))
        return self.group.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class ParallelLMHead(ParallelLinear):
    """Output head: logits over the vocabulary, whole on every rank, without the padding."""

    def __init__(self, hidden_size: int, vocab_size: int, bias: bool, group: Group, dtype: torch.dtype) -> None:
        weight = _vocab_parameter(vocab_size, (hidden_size,), group, dtype)
        offsets = _vocab_parameter(vocab_size, (), group, dtype) if bias else None
        super().__init__(weight, offsets, group)
        self.vocab_size = vocab_size
        start, stop = vocab_range(vocab_size, group.rank, group.size, ROW_MULTIPLE)
        self.num_own = stop - start  # of this rank's rows; the others are padding
        self.share = weight.shape[0]  # rows of this rank

    def tie_to(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's rows as weight; loading either loads both.

        Raises `ValueError` when vocabulary or width differ.
        """
        if embedding.weight.shape != self.weight.shape or embedding.vocab_size != self.vocab_size:
            raise ValueError(
                f"cannot tie an output head of {tuple(self.weight.shape)} to an embedding of "
                f"{tuple(embedding.weight.shape)} (vocabularies {self.vocab_size} and {embedding.vocab_size})"
            )
        self.use_weight(embedding.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits on every rank: [num_rows, hidden] -> [num_rows, vocab]."""
        return self.join(self.own(x))

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's share of the logits, padding after the first `num_own`: [num_rows, vocab_per_rank]."""
        return self.method.apply(x, self.bias)

    def join(self, own: Tensor) -> Tensor:
        """Return the logits on every rank from those of `own`: [num_rows, vocab_per_rank] -> [num_rows, vocab]."""
        return self.group.all_gather(own)[:, : self.vocab_size]


class LearnedPositions(nn.Module):
    """A table of absolute position embeddings, whole on every rank."""

    weight: ShardedParameter

    def __init__(self, positions: int, hidden: int, build: Build) -> None:
        super().__init__()
        self.weight = replicated((positions, hidden), build.dtype, build.group.device)

    def forward(self, positions: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden]."""
        return F.embedding(positions, self.weight)


def _vocab_parameter(vocab_size: int, tail: tuple[int, ...], group: Group, dtype: torch.dtype) -> ShardedParameter:
    rows = padded_vocab(vocab_size, group.size, ROW_MULTIPLE) // group.size
    pieces = vocab_pieces(vocab_size, group.rank, group.size, ROW_MULTIPLE)
    return ShardedParameter.of((rows, *tail), dtype, group.device, 0, pieces)
