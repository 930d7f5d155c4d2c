"""Which replica has which KV block in its prefix cache, as its block events say, and which blocks a prompt has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cluster.wire.replica_messages import BlockUpdate
from cluster.wire.translation import block_key
from engine.kv.block_manager import TOKEN_BYTES, following_hashes, root_hash, token_bytes

STRIDE = 8  # blocks between two looks into the index while nothing changes
MAX_DEAD = 64  # lives of replicas whose entries may lie about before they are swept out
SWEPT_AT_ONCE = 2048  # keys: a request never waits for a sweep through a full index, only for a list of its keys
# One in so many blocks is forgotten at a time: a search for the oldest reads past all that were deleted before it.
FORGOTTEN_AT_ONCE = 256


class PromptKeys:
    """Keys of the leading full blocks of one prompt: hashed once, and only as far as some replica has them.

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


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of a prompt is cached where. depths: replica id -> leading blocks that it has, if any.

    cold_key: name of the first block that none has; None if there is none, or it was not looked up.
    heir: the replica that is about to have that block, or had it last, if any.
    """

    depths: Mapping[str, int] = field(default_factory=dict)
    cold_key: int | None = None
    heir: str | None = None


class PrefixIndex:
    """Exact as long as every update of a replica arrives; `update` and `is_complete` return when one did not.

    Wrong entries only cost time: the replica compares token ids before it uses a block.

    Bounded to `max_blocks` keys; those stored longest ago are forgotten first. Each key has an integer whose bits are
    the replicas that hold it. A replica's bit is that of one life: after a loss or a gap it gets a new one, and the
    entries of the former count for nothing until they are swept out.
    """

    def __init__(self, max_blocks: int = 1_000_000) -> None:
        self._max_blocks = max_blocks
        self._max_heirs = max(1, max_blocks // 4)
        self._holders: dict[int, int] = {}  # block key -> bits of its holders; stored longest ago first
        self._bits: dict[str, int] = {}  # replica id -> number of its bit
        self._names: list[str] = []  # number of a bit -> replica id, the last one that had it
        self._free: list[int] = []  # numbers of bits that no entry has
        self._dead: list[int] = []  # numbers of bits that entries of former lives may have
        self._leaving: list[int] = []  # those that are being swept out
        self._unswept: list[int] = []  # keys whose entries may still have them
        self._alive = 0  # the bits of `_bits`
        self._heirs: dict[int, int] = {}  # key of a block that none has -> bit of who gets it or had it last
        self._next_sequence: dict[str, int] = {}
        self._incomplete: set[str] = set()

    def __len__(self) -> int:
        return len(self._holders)

    def update(
        self, replica_id: str, sequence: int, stored: Iterable[int], removed: Iterable[int], cleared: bool = False
    ) -> bool:
        """Take in one update of a replica. Returns whether what is known of it is all that it has.

        After a gap in `sequence` only what comes from then on is believed, until an update that clears sends all
        anew. A repeated or late update is passed over. A key both removed and stored counts as stored.
        """
        expected = self._next_sequence.get(replica_id, 0)
        if sequence < expected:
            return replica_id not in self._incomplete
        if cleared:
            self._renew(replica_id)
            self._incomplete.discard(replica_id)
        elif sequence > expected:
            self._renew(replica_id)
            self._incomplete.add(replica_id)
        self._next_sequence[replica_id] = sequence + 1
        self._apply(1 << self._number_of(replica_id), stored, removed)
        return replica_id not in self._incomplete

    def heard_all(self, replica_id: str, num_updates: int) -> bool:
        """Note how many updates a replica has sent by now. Returns as `update` does."""
        if num_updates > self._next_sequence.get(replica_id, 0):
            self._next_sequence[replica_id] = num_updates
            self._renew(replica_id)
            self._incomplete.add(replica_id)
        return replica_id not in self._incomplete

    def drop(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        self._bury(replica_id)
        self._next_sequence.pop(replica_id, None)
        self._incomplete.discard(replica_id)

    def look_up(self, keys: PromptKeys) -> Overlap:
        """Return how many leading blocks of a prompt each replica has.

        The first blocks are all looked at, then every eighth, and those between where some replica's prefix ends: a
        name stands for all that comes before it, and caches give up tails before heads.
        """
        alive, depth, total = self._alive, 0, len(keys)
        depths: dict[str, int] = {}
        holders = self._holders.get
        names: Sequence[int] = ()
        while alive and depth < total:
            ahead = min(depth + STRIDE, total)
            if ahead > len(names):
                names = keys.first(ahead)
            if depth and alive & holders(names[ahead - 1], 0) == alive:
                depth = ahead
                continue
            while alive and depth < ahead:
                kept = alive & holders(names[depth], 0)
                if kept != alive:
                    self._note(depths, alive ^ kept, depth)
                    alive = kept
                depth += 1 if alive else 0
        self._note(depths, alive, depth)
        if depth == total:
            return Overlap(depths)
        cold_key = keys.first(depth + 1)[depth]
        heir = self._heirs.get(cold_key, 0) & self._alive
        return Overlap(depths, cold_key, self._names[heir.bit_length() - 1] if heir else None)

    def expect(self, key: int, replica_id: str) -> None:
        """Note that a block that none has will be computed by a replica: it is the heir from now on."""
        self._inherit(key, 1 << self._number_of(replica_id))

    def _note(self, depths: dict[str, int], bits: int, depth: int) -> None:
        while bits and depth:
            lowest = bits & -bits
            depths[self._names[lowest.bit_length() - 1]] = depth
            bits ^= lowest

    def _apply(self, bit: int, stored: Iterable[int], removed: Iterable[int]) -> None:
        self._sweep()
        holders = self._holders
        for key in removed:
            had = holders.get(key, 0)
            left = had & ~bit
            if left:
                holders[key] = left
            elif had:
                del holders[key]
                self._inherit(key, bit)
        for key in stored:
            holders[key] = holders.pop(key, 0) | bit  # at the end of the order
        excess = len(holders) - self._max_blocks
        if excess > 0:
            _forget_oldest(holders, max(excess, self._max_blocks // FORGOTTEN_AT_ONCE))

    def _inherit(self, key: int, bit: int) -> None:
        heirs = self._heirs
        heirs.pop(key, None)
        heirs[key] = bit
        if len(heirs) > self._max_heirs:
            _forget_oldest(heirs, max(1, self._max_heirs // FORGOTTEN_AT_ONCE))

    def _number_of(self, replica_id: str) -> int:
        number = self._bits.get(replica_id)
        return self._renew(replica_id) if number is None else number

    def _renew(self, replica_id: str) -> int:
        """Give a replica a bit that no entry has."""
        self._bury(replica_id)
        if self._free:
            number = self._free.pop()
            self._names[number] = replica_id
        else:
            number = len(self._names)
            self._names.append(replica_id)
        self._bits[replica_id] = number
        self._alive |= 1 << number
        return number

    def _bury(self, replica_id: str) -> None:
        number = self._bits.pop(replica_id, None)
        if number is None:
            return
        self._alive &= ~(1 << number)
        self._dead.append(number)
        self._sweep()

    def _sweep(self) -> None:
        """Take the bits of former lives out of some more entries; once out of all, they can be given again."""
        if not self._leaving:
            if len(self._dead) < MAX_DEAD:
                return
            self._leaving, self._dead = self._dead, []
            self._unswept = [*self._holders, *self._heirs]  # what is stored from now on has none of these bits
        gone = sum(1 << number for number in self._leaving)
        holders, heirs = self._holders, self._heirs
        for key in self._unswept[-SWEPT_AT_ONCE:]:
            bits = holders.get(key, 0)
            if bits & gone:
                if left := bits & ~gone:
                    holders[key] = left
                else:
                    del holders[key]
            if heirs.get(key, 0) & gone:
                del heirs[key]
        del self._unswept[-SWEPT_AT_ONCE:]
        if not self._unswept:
            self._free += self._leaving
            self._leaving = []


def _forget_oldest(entries: dict[int, int], count: int) -> None:
    for key in list(islice(entries, count)):
        del entries[key]


class CacheReports:
    """Feeds the index of one router with the replicas' updates, and asks for all anew where one is missing.

    ask: has a replica, by its id, tell all that its prefix cache holds. interval: seconds between two such wishes.
    num_resyncs: wishes so far.
    """

    def __init__(self, ask: Callable[[str], None], interval: float) -> None:
        self.index = PrefixIndex()
        self.num_resyncs = 0
        self._ask = ask
        self._interval = interval
        self._asked: dict[str, float] = {}  # replica id -> when it was asked last

    def note_update(self, replica_id: str, update: BlockUpdate, now: float) -> None:
        """Take in what a cache gained and lost."""
        whole = self.index.update(replica_id, update.sequence, update.stored, update.removed, update.cleared)
        self._settle(replica_id, whole, now)

    def note_count(self, replica_id: str, num_updates: int, now: float) -> None:
        """Take in how many updates a replica has sent: the last one may be the one that was lost."""
        self._settle(replica_id, self.index.heard_all(replica_id, num_updates), now)

    def drop(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        self.index.drop(replica_id)
        self._asked.pop(replica_id, None)

    def _settle(self, replica_id: str, whole: bool, now: float) -> None:
        if whole or now - self._asked.get(replica_id, -self._interval) < self._interval:
            return
        self._asked[replica_id] = now
        self.num_resyncs += 1
        self._ask(replica_id)
