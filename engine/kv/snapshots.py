"""Snapshots of recurrent states: which slots hold one, and under which prefix it is found."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from engine.errors import IntegrityError


class StateSnapshots:
    """The slots of the state cache behind those of running sequences, each free, being written, or found by a prefix.

    A state does not grow with its sequence and is far larger than a block's keys and values, so blocks have none of
    their own: every `interval` tokens a copy is kept, named as the block that ends there is. Which blocks are there
    is not known here. A snapshot that somebody holds, to start from it in the next step, is not evicted.
    """

    def __init__(self, first: int, count: int, interval: int) -> None:
        """first, count: the slots. interval: tokens from one snapshot of a sequence to the next."""
        self.interval = interval
        self._slots = range(first, first + count)
        self._free = list(reversed(self._slots))
        self._index: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._holders: Counter[int] = Counter()
        self._orphans: set[int] = set()  # held, and not found any more

    @property
    def any(self) -> bool:
        """Whether there can be snapshots at all."""
        return len(self._slots) > 0

    @property
    def num_found(self) -> int:
        """Snapshots that can be found."""
        return len(self._index)

    def knows(self, digest: bytes) -> bool:
        """Whether there is a snapshot of this prefix."""
        return digest in self._index

    def deepest(self, digests: Sequence[bytes], block_size: int) -> int:
        """Return how many of the leading blocks, of these digests, end at the deepest snapshot; 0 = there is none."""
        apart = self.interval // block_size
        for count in range(len(digests) // apart * apart, 0, -apart):
            if digests[count - 1] in self._index:
                return count
        return 0

    def hold(self, digest: bytes) -> int:
        """Return the slot of a snapshot that `deepest` found; it stays until `let_go`."""
        slot = self._index[digest]
        self._index.move_to_end(digest)
        self._holders[slot] += 1
        return slot

    def let_go(self, slot: int) -> None:
        """Undo one `hold`."""
        self._holders[slot] -= 1
        if not self._holders[slot]:
            del self._holders[slot]
            if slot in self._orphans:
                self._orphans.remove(slot)
                self._free.append(slot)

    def take(self) -> int | None:
        """Return a slot to write to, the least recently used one where none is free; None where all are held."""
        if self._free:
            return self._free.pop()
        for digest, slot in self._index.items():
            if slot not in self._holders:
                del self._index[digest]
                return slot
        return None

    def seal(self, slot: int, digest: bytes) -> None:
        """Make a written snapshot findable. If an equal one is known already, that one stays."""
        if digest in self._index:
            self._free.append(slot)
        else:
            self._index[digest] = slot

    def give_back(self, slot: int) -> None:
        """Take back a slot that `take` returned and that is not to be found."""
        self._free.append(slot)

    def clear(self) -> None:
        """Forget all snapshots; those that are held stay for their holders alone."""
        for slot in self._index.values():
            if slot in self._holders:
                self._orphans.add(slot)
            else:
                self._free.append(slot)
        self._index.clear()

    def check_integrity(self, writing: Sequence[int], held: Sequence[int]) -> None:
        """Check that every slot is free, written, or found, once. Raises `IntegrityError`.

        writing: slots that steps are planned or launched to write. held: those that are held, once a holder.
        """
        if sorted([*self._free, *self._index.values(), *self._orphans, *writing]) != list(self._slots):
            raise IntegrityError("free, written and findable snapshots are not all snapshots, each once")
        if Counter(held) != self._holders:
            raise IntegrityError("snapshots are held by others than start from them")
