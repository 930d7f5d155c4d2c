"""Pure arithmetic of splitting sizes over the ranks of a tensor-parallel group. Imports nothing but errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one part of a parameter comes from on disk and goes to on this rank, along the sharded axis.

    key: "q", "k", "v" or an index for merged parameters; "" where there is only one part.
    full: size of the whole part on disk.
    start: first element on disk that this rank reads.
    size: elements that this rank reads (0 where the range is padding only).
    offset: first element of this part in the rank's own parameter.
    """

    key: str | int
    full: int
    start: int
    size: int
    offset: int


def divide(total: int, size: int, name: str) -> int:
    """Return `total / size`, or raise `ShardingError` naming the dimension and group sizes that work."""
    if size < 1:
        raise ShardingError(f"a tensor-parallel group has at least 1 rank, not {size}")
    if total % size:
        fits = ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)
        raise ShardingError(f"{name} = {total} cannot be split over {size} ranks; sizes that work: {fits}")
    return total // size


def kv_heads_per_rank(num_kv_heads: int, size: int, name: str = "num_key_value_heads") -> int:
    """Return the KV heads that each rank holds: a share of them, or one that several ranks hold alike.

    Raises `ShardingError` when heads and ranks divide each other in neither direction.
    """
    if size >= 1 and num_kv_heads % size == 0:
        return num_kv_heads // size
    if size >= 1 and size % num_kv_heads == 0:
        return 1
    fits = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0] + [num_kv_heads * n for n in (2, 3, 4)]
    raise ShardingError(
        f"{name} = {num_kv_heads} can be neither split over nor replicated on {size} ranks; "
        f"sizes that work: {', '.join(map(str, fits))}"
    )


def kv_head_start(num_kv_heads: int, rank: int, size: int) -> int:
    """Return the first KV head of `rank`; ranks that share a replicated head are neighbours."""
    per_rank = kv_heads_per_rank(num_kv_heads, size)
    return rank * per_rank if size <= num_kv_heads else rank // (size // num_kv_heads)


def padded_vocab(vocab: int, size: int, multiple: int = 1) -> int:
    """Return the least vocabulary >= `vocab` whose share per rank is whole and a multiple of `multiple`."""
    if vocab < 1 or size < 1 or multiple < 1:
        raise ShardingError(f"vocabulary {vocab}, ranks {size} and multiple {multiple} must all be at least 1")
    step = size * multiple
    return -(-vocab // step) * step


def vocab_range(vocab: int, rank: int, size: int, multiple: int = 1) -> tuple[int, int]:
    """Return the half-open range of real token ids that `rank` holds; empty where it holds padding only."""
    share = padded_vocab(vocab, size, multiple) // size
    return min(rank * share, vocab), min((rank + 1) * share, vocab)


def even_pieces(
    sizes: Sequence[int], rank: int, size: int, name: str, heads: Sequence[int] | None = None
) -> tuple[Piece, ...]:
    """Return the pieces of parameters that are merged one after another, each split evenly over the ranks.

    heads: into how many each can be cut; ranks that outnumber them hold them alike. None = each feature is one.
    """
    pieces: list[Piece] = []
    offset = 0
    for index, full in enumerate(sizes):
        called = name if len(sizes) == 1 else f"{name}[{index}]"
        if heads is None:
            share = divide(full, size, called)
            start = rank * share
        else:
            each = divide(full, heads[index], called)
            share = each * kv_heads_per_rank(heads[index], size, called)
            start = each * kv_head_start(heads[index], rank, size)
        pieces.append(Piece(index if len(sizes) > 1 else "", full, start, share, offset))
        offset += share
    return tuple(pieces)


def qkv_pieces(num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> tuple[Piece, ...]:
    """Return the pieces "q", "k", "v" of a merged projection; KV heads are replicated where ranks outnumber them."""
    heads = divide(num_heads, size, "num_attention_heads")
    kv_heads = kv_heads_per_rank(num_kv_heads, size)
    q, kv = heads * head_dim, kv_heads * head_dim
    first_kv = kv_head_start(num_kv_heads, rank, size) * head_dim
    return (
        Piece("q", num_heads * head_dim, rank * q, q, 0),
        Piece("k", num_kv_heads * head_dim, first_kv, kv, q),
        Piece("v", num_kv_heads * head_dim, first_kv, kv, q + kv),
    )


def vocab_pieces(vocab: int, rank: int, size: int, multiple: int = 1) -> tuple[Piece, ...]:
    """Return the one piece of a vocabulary-parallel parameter; what is beyond the vocabulary stays zero."""
    start, stop = vocab_range(vocab, rank, size, multiple)
    return (Piece("", vocab, start, stop - start, 0),)
