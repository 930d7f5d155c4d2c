"""The recurrent states of running sequences: where each is read from, and what is copied of them after a step.

A running sequence's state is in the slot of the state cache that has the number of its slot in the tables, and steps
update it there. That has two consequences. A step is only right once: one that was not completed leaves states of no
known position, so its sequences are preempted and start again (`Scheduler.recompute`). And nothing is copied before a
step: a sequence that starts from a snapshot reads that in its first step, and what others get of a state, snapshots
and the siblings of n > 1, is copied when the step has run, so that its order with all else on the device is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np

from engine.errors import IntegrityError
from engine.kv.snapshots import StateSnapshots
from engine.report import Ints
from engine.request import Sequence
from engine.scheduler.schedule import Index, Schedule, StateMoves

NOWHERE = -1  # the state of a sequence of no tokens, which is all zeros


class States:
    """Knows for each slot of the tables from where the next step of its sequence reads its state.

    snapshots: to take and start from, every `snapshots.interval` tokens; no step computes across such a boundary.
    """

    def __init__(self, num_slots: int, block_size: int, snapshots: StateSnapshots) -> None:
        self.snapshots = snapshots
        self._block_size = block_size
        self._sources: Ints = np.full(num_slots, NOWHERE, np.int32)
        self._held: dict[int, int] = {}  # slot of the tables -> snapshot that it starts from
        self._planned: list[int] = []  # snapshots that the last plan, not launched yet, is to write
        self._writing: set[int] = set()  # those of steps in flight

    def reach(self, computed: Ints) -> Ints:
        """Return how many tokens sequences may compute until the next boundary, given those computed. [any]."""
        interval = self.snapshots.interval
        return interval - computed % interval

    def cut(self, wanted: Ints, computed: Ints) -> Ints:
        """Return the tokens wanted of each sequence, but none across a boundary. [any]."""
        return np.minimum(wanted, self.reach(computed)) if self.snapshots.any else wanted

    def deepest(self, digests: Items[bytes]) -> int:
        """Return how many leading blocks, found in the prefix cache, a sequence can start with."""
        return self.snapshots.deepest(digests, self._block_size)

    def start(self, slot: int, digest: bytes | None) -> None:
        """Let a sequence start in `slot`. digest: of the last block of its prefix, None = from nothing."""
        if digest is not None:
            snapshot = self._held[slot] = self.snapshots.hold(digest)
            self._sources[slot] = snapshot

    def share(self, slot: int) -> None:
        """Let a sibling run in `slot`, whose state was copied there when its leader's prompt was computed."""
        self._sources[slot] = slot

    def leave(self, slot: int) -> None:
        """Forget the state of a slot."""
        self._sources[slot] = NOWHERE
        self._let_go(slot)

    def plan(self, schedule: Schedule, siblings: Mapping[Sequence, list[Sequence]], seals: bool) -> StateMoves:
        """Return what a step does with states. seals: whether blocks, and so snapshots, are named.

        What an earlier plan was to write is free again, unless its step was launched.
        """
        for snapshot in self._planned:
            self.snapshots.give_back(snapshot)
        self._planned = []
        copies = [(leader.slot, sibling.slot) for leader in schedule.forks for sibling in siblings.get(leader, ())]
        rows: list[int] = []
        if seals and self.snapshots.any:
            rows = (schedule.seq_lens % self.snapshots.interval == 0).nonzero()[0].tolist()
        taken: list[tuple[int, int]] = []
        for row in rows:
            if self._is_known(schedule.sequences[row], int(schedule.seq_lens[row])):
                continue
            target = self.snapshots.take()
            if target is None:
                break
            taken.append((row, target))
            copies.append((int(schedule.slots[row]), target))
        self._planned = [snapshot for _, snapshot in taken]
        return StateMoves(self._sources[schedule.slots], copies, taken)

    def launch(self, slots: Index) -> None:
        """Note that a step was launched, the one planned last, in which the sequences of `slots` compute."""
        self._sources[slots] = slots
        if self._held:
            for slot in slots.tolist():
                self._let_go(slot)
        self._writing.update(self._planned)
        self._planned = []

    def collect(self, schedule: Schedule, moves: StateMoves, dropped: bool = False) -> None:
        """Make the snapshots of a step that was run findable, those of sequences that are still there.

        Their full blocks are named by now. dropped: all of them have left.
        """
        for row, snapshot in moves.snapshots:
            self._writing.discard(snapshot)
            sequence, blocks = schedule.sequences[row], int(schedule.seq_lens[row]) // self._block_size
            if dropped or sequence in schedule.gone or len(sequence.block_hashes) < blocks:
                self.snapshots.give_back(snapshot)
            else:
                self.snapshots.seal(snapshot, sequence.block_hashes[blocks - 1])

    def check_integrity(self, placed: Items[Sequence]) -> None:
        """Check the snapshots, and that free slots have no state. Raises `IntegrityError`."""
        used = {sequence.slot for sequence in placed}
        if any(slot not in used for slot in (self._sources >= 0).nonzero()[0].tolist()):
            raise IntegrityError("a free slot has a recurrent state")
        for sequence in placed:
            if sequence.num_computed_tokens and self._sources[sequence.slot] < 0:
                raise IntegrityError(f"sequence {sequence.order} has computed tokens, and no state of them")
        self.snapshots.check_integrity([*self._planned, *self._writing], list(self._held.values()))

    def _is_known(self, sequence: Sequence, length: int) -> bool:
        """Whether the snapshot of a sequence's first `length` tokens is there, as far as is known before a step."""
        hashes, blocks = sequence.block_hashes, length // self._block_size
        return len(hashes) >= blocks and self.snapshots.knows(hashes[blocks - 1])

    def _let_go(self, slot: int) -> None:
        snapshot = self._held.pop(slot, None)
        if snapshot is not None:
            self.snapshots.let_go(snapshot)
