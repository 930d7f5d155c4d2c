"""KV blocks: reference counts, the prefix cache of full ones, and the hashes that name them.

The name of a full block is a chained BLAKE2b digest of everything up to the block's end. It depends on the token ids
of the block and of all blocks before it, on the tenant's salt and on the adapter, and on nothing else: the router and
every replica, in any process, give a block the same name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.errors import IntegrityError
from engine.kv.snapshots import StateSnapshots
from engine.report import BlockEvents

DIGEST_BYTES = 32  # collision resistant on its own, for the router compares nothing but digests
TOKEN_BYTES = 4
UNBEGUN = blake2b(digest_size=DIGEST_BYTES)  # a copy is made in half the time


def root_hash(salt: bytes = b"", adapter: str = "") -> bytes:
    """Return the parent of a sequence's first block. The salt's length is hashed too, so that no two pairs meet."""
    return blake2b(len(salt).to_bytes(8, "little") + salt + adapter.encode(), digest_size=DIGEST_BYTES).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the digest of a full block. `tokens`: its ids as little-endian int32."""
    digest = UNBEGUN.copy()
    digest.update(parent)
    digest.update(tokens)
    return digest.digest()


def block_hashes(parents: Iterable[bytes], contents: Iterable[bytes]) -> list[bytes]:
    """Return the `block_hash` of each of many blocks."""
    return [block_hash(parent, tokens) for parent, tokens in zip(parents, contents, strict=True)]


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


NO_EVENTS = BlockEvents()


class BlockManager:
    """Fixed-size blocks with reference counts and a prefix cache. Every operation is O(1) per block.

    A block is in one of three states: held (`refs > 0`), cached (free to take, but found by `match` until it is
    taken), or free. Block 0 is the null block: it pads block tables and is never handed out.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """snapshots: of recurrent states, to be forgotten with the blocks; None where there are none."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: block 1 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._contents: list[bytes] = [b""] * num_blocks  # token ids of the blocks in the index
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._cleared = False
        self._snapshots = snapshots

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that no table holds, but which `match` can still find."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, empty ones first, then the least recently used cached ones.

        Raises `ValueError`, having taken nothing, when fewer than `count` are available.
        """
        if count > self.num_available:
            raise ValueError(f"{count} KV blocks wanted, {self.num_available} available")
        free, refs = self._free, self._refs
        taken = free[: -count - 1 : -1]
        del free[len(free) - len(taken) :]
        if len(taken) < count:
            taken.extend([self._evict() for _ in range(count - len(taken))])
        for block in taken:
            refs[block] = 1
        return taken

    def match(self, hashes: Sequence[bytes], tokens: bytes) -> list[int]:
        """Return the cached blocks of the longest known prefix; they are not held yet (see `acquire`).

        hashes: digests of the leading full blocks. tokens: all token ids as int32, compared on every hit.
        """
        width = self.block_size * TOKEN_BYTES
        found: list[int] = []
        for i, digest in enumerate(hashes):
            block = self._index.get(digest)
            if block is None or self._contents[block] != tokens[i * width : (i + 1) * width]:
                break
            found.append(block)
        return found

    def knows(self, digest: bytes) -> bool:
        """Whether a block with this digest can be found."""
        return digest in self._index

    def count_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` no table holds, so that acquiring them makes fewer available."""
        return sum(not self._refs[block] for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> list[int]:
        """Hold blocks that `match` found, or that another table holds; return those that no table held."""
        taken = []
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
                taken.append(block)
            self._refs[block] += 1
        return taken

    def release(self, table: list[int]) -> list[int]:
        """Let go of a whole table; return those of its blocks that no table holds any more.

        Tails are freed first, so that they are evicted before the heads they need.
        """
        refs, hashes, free, cached = self._refs, self._hashes, self._free, self._cached
        freed = []
        for block in reversed(table):
            refs[block] -= 1
            if refs[block]:
                continue
            freed.append(block)
            if hashes[block] is None:
                free.append(block)
            else:
                cached[block] = None
        return freed

    def is_shared(self, block: int) -> bool:
        """Whether more than one table holds `block`."""
        return self._refs[block] > 1

    def part(self, block: int) -> int | None:
        """Return the block to write instead of `block`, as a copy of it; None where no other table holds that one.

        Raises `ValueError`, having changed nothing, when a copy is needed and no block is available.
        """
        if self._refs[block] == 1:
            return None
        (copy,) = self.allocate(1)
        self._refs[block] -= 1
        return copy

    def seal(self, blocks: Iterable[int], digests: Iterable[bytes], contents: Iterable[bytes]) -> None:
        """Make full, computed blocks findable. If an equal one is known already, that one stays.

        digests / contents: of each block, its name and its token ids as int32.
        """
        index, hashes, known, stored, removed = self._index, self._hashes, self._contents, self._stored, self._removed
        for block, digest, tokens in zip(blocks, digests, contents, strict=True):
            if digest in index:
                continue
            index[digest] = block
            hashes[block] = digest
            known[block] = tokens
            if removed and digest in removed:
                del removed[digest]
            else:
                stored[digest] = None

    def clear_cache(self) -> None:
        """Forget all contents; tables keep the blocks that they hold."""
        for block in self._index.values():
            self._hashes[block] = None
            self._contents[block] = b""
        if self._snapshots is not None:
            self._snapshots.clear()
        self._index.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        self._stored.clear()
        self._removed.clear()
        self._cleared = True

    def known_hashes(self) -> tuple[bytes, ...]:
        """Return the digests of all findable blocks: the state that a listener which joins late starts from."""
        return tuple(self._index)

    def take_events(self) -> BlockEvents:
        """Return the net change of the cache since the last call; `cleared` happened before the rest."""
        if not (self._stored or self._removed or self._cleared):
            return NO_EVENTS
        events = BlockEvents(tuple(self._stored), tuple(self._removed), self._cleared)
        self._stored.clear()
        self._removed.clear()
        self._cleared = False
        return events

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Check all invariants against the live block tables. Raises `IntegrityError`. O(blocks)."""
        held = Counter(block for table in tables for block in table)
        for block, refs in enumerate(self._refs):
            if refs != held[block]:
                raise IntegrityError(f"block {block} has {refs} references, but is in {held[block]} tables")
        if held[0] or self._hashes[0] is not None:
            raise IntegrityError("the null block is in use")
        if sorted([*self._free, *self._cached, *held]) != list(range(1, self.num_blocks)):
            raise IntegrityError("free + cached + held blocks are not all blocks, each once")
        self._check_index()

    def _check_index(self) -> None:
        for digest, block in self._index.items():
            if self._hashes[block] != digest:
                raise IntegrityError(f"the index finds block {block} under a hash that it does not have")
        named = {block for block, digest in enumerate(self._hashes) if digest is not None}
        if named != set(self._index.values()) or not named.issuperset(self._cached):
            raise IntegrityError("blocks with a hash and the index differ")
        if named.intersection(self._free):
            raise IntegrityError("an empty block still has a hash")

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._hashes[block]
        if digest is None:
            raise IntegrityError(f"cached block {block} has no hash")
        del self._index[digest]
        self._hashes[block] = None
        self._contents[block] = b""
        if digest in self._stored:
            del self._stored[digest]
        else:
            self._removed[digest] = None
        return block
