"""The names of a prompt's KV blocks as the router uses them: hashed once, and only as far as anybody has them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from cluster.wire.translation import block_key
from engine.kv.prefix_hash import TOKEN_BYTES, following_hashes, root_hash, token_bytes


class PromptKeys:
    """Keys of the leading full blocks of one prompt.

    A prompt that no vocabulary holds has none: the replica refuses it by name.
    """

    __slots__ = ("_digests", "_keys", "_num_blocks")

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> None:
        try:
            tokens = token_bytes(token_ids)
        except OverflowError:
            tokens = b""
        self._num_blocks = len(tokens) // (block_size * TOKEN_BYTES)
        self._digests = following_hashes(root_hash(salt), tokens, block_size)
        self._keys: list[int] = []

    def __len__(self) -> int:
        return self._num_blocks

    def first(self, count: int) -> Sequence[int]:
        """Return the keys of at least the first `count` blocks; there must be as many."""
        keys = self._keys
        if count > len(keys):
            keys.extend(map(block_key, islice(self._digests, count - len(keys))))
        return keys
