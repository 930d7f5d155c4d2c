"""The names of a prompt's KV blocks as the router uses them: hashed once, and only as far as anybody has them."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.translation import block_key
from engine.prefix_hash import TOKEN_BYTES, block_hash, root_hash, token_bytes


class PromptKeys:
    """Keys of the leading full blocks of one prompt.

    A prompt that no vocabulary holds has none: the replica refuses it by name.
    """

    __slots__ = ("_keys", "_num_blocks", "_parent", "_tokens", "_width")

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> None:
        try:
            self._tokens = token_bytes(token_ids)
        except OverflowError:
            self._tokens = b""
        self._width = block_size * TOKEN_BYTES
        self._num_blocks = len(self._tokens) // self._width
        self._parent = root_hash(salt)
        self._keys: list[int] = []

    def __len__(self) -> int:
        return self._num_blocks

    def first(self, count: int) -> Sequence[int]:
        """Return the keys of at least the first `count` blocks; there must be as many."""
        keys, parent, width, tokens = self._keys, self._parent, self._width, self._tokens
        if count <= len(keys):
            return keys
        for start in range(len(keys) * width, count * width, width):
            parent = block_hash(parent, tokens[start : start + width])
            keys.append(block_key(parent))
        self._parent = parent
        return keys
