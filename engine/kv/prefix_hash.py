"""Names of full KV blocks: a chained BLAKE2b digest of everything up to the block's end.

A digest depends on the token ids of the block and of all blocks before it, on the tenant's salt and on the adapter,
and on nothing else: the router and every replica, in any process, give a block the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 32  # collision resistant on its own, for the router compares nothing but digests
TOKEN_BYTES = 4


def root_hash(salt: bytes = b"", adapter: str = "") -> bytes:
    """Return the parent of a sequence's first block. The salt's length is hashed too, so that no two pairs meet."""
    return blake2b(len(salt).to_bytes(8, "little") + salt + adapter.encode(), digest_size=DIGEST_BYTES).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the digest of a full block. `tokens`: its ids as little-endian int32."""
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def token_bytes(token_ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Return token ids as little-endian int32. Raises `OverflowError` for an id outside int32."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def following_hashes(parent: bytes, tokens: bytes, block_size: int, first: int = 0) -> Iterator[bytes]:
    """Yield the digests of the full blocks of `tokens` from number `first` on. parent: that of the one before."""
    width = block_size * TOKEN_BYTES
    for start in range(first * width, len(tokens) - width + 1, width):
        parent = block_hash(parent, tokens[start : start + width])
        yield parent


def extend_hashes(hashes: list[bytes], tokens: bytes, block_size: int, root: bytes) -> None:
    """Append to `hashes`, those of the first blocks of `tokens`, the digests of its other full blocks."""
    hashes.extend(following_hashes(hashes[-1] if hashes else root, tokens, block_size, len(hashes)))


def prompt_hashes(
    token_ids: Sequence[int] | NDArray[np.int32], block_size: int, salt: bytes = b"", adapter: str = ""
) -> list[bytes]:
    """Return the digests of all full blocks of a prompt, first block first; a partial last block has none."""
    hashes: list[bytes] = []
    extend_hashes(hashes, token_bytes(token_ids), block_size, root_hash(salt, adapter))
    return hashes
