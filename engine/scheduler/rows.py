"""The memory of running sequences: a slot in the tables and a list of blocks, kept in step with each other."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from engine.errors import IntegrityError
from engine.kv.block_manager import BlockManager
from engine.kv.prefix_hash import TOKEN_BYTES, block_hash, extend_hashes, root_hash, token_bytes
from engine.report import Ints
from engine.request import Sequence
from engine.sampling.parameter_table import SamplingTable
from engine.scheduler.schedule import Index
from engine.scheduler.stops import StopTokens
from engine.scheduler.tables import Tables
from engine.telemetry.ledger import Ledger


class Rows:
    """Places sequences, gives them blocks, shares what they have in common, and takes all of it back.

    `Sequence.block_table` and the block manager hold the truth about blocks; `tables.blocks` mirrors it for the
    inputs. Used by the scheduler only; one thread.
    """

    def __init__(
        self, tables: Tables, params: SamplingTable, blocks: BlockManager, stops: StopTokens, ledger: Ledger
    ) -> None:
        self.tables = tables
        self.blocks = blocks
        self._ledger = ledger
        self._params = params
        self._stops = stops
        # Destination -> source of block copies that the next step must make. A destination that is given up before is
        # copied to nonetheless: its next owner writes later in the step.
        self.copies: dict[int, int] = {}
        self._num_structured = 0
        self._free_slots = list(range(tables.num_slots - 1, -1, -1))  # a stack: slot 0 is taken first

    @property
    def any_structured(self) -> bool:
        """Whether the output of any placed sequence must match a grammar."""
        return self._num_structured > 0

    @property
    def structured(self) -> NDArray[np.bool_]:
        """Slots whose output must match a grammar. [S]."""
        return self._params.structured

    @property
    def num_free_slots(self) -> int:
        """Sequences that can still be placed."""
        return len(self._free_slots)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens`."""
        return -(-num_tokens // self.blocks.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks that `sequence` can start with (not held yet).

        The block of the last known token is never among them: its logits are wanted, and computing one block again
        costs less than a copy-on-write of a block that others read.
        """
        if not self.blocks.enable_prefix_caching:
            return []
        request, size = sequence.request, self.blocks.block_size
        tokens = token_bytes(request.prompt_token_ids) + token_bytes(sequence.resume_tokens)
        extend_hashes(sequence.block_hashes, tokens, size, root_hash(request.cache_salt))
        return self.blocks.match(sequence.block_hashes[: sequence.num_reusable_tokens // size], tokens)

    def extend_prefix(self, sequence: Sequence, found: int) -> list[int]:
        """Return the cached blocks behind the first `found`, which `find_prefix` returned before. O(returned)."""
        hashes, size = sequence.block_hashes, self.blocks.block_size
        most = min(len(hashes), sequence.num_reusable_tokens // size) if self.blocks.enable_prefix_caching else 0
        beyond = found
        while beyond < most and self.blocks.knows(hashes[beyond]):
            beyond += 1
        if beyond == found:
            return []
        return self.blocks.match(
            hashes[found:beyond], token_bytes(sequence.known_tokens(found * size, beyond * size))
        )

    def place(self, sequence: Sequence, siblings: Items[Sequence], prefix: list[int], limit: int) -> None:
        """Give `sequence` a slot with all its tokens, and the blocks of `prefix`; keep slots for its siblings."""
        slot = self._take_slot(sequence)
        self.tables.fill(slot, sequence.request.prompt_token_ids, sequence.resume_tokens, limit)
        self.blocks.acquire(prefix, sequence.request.tenant)
        sequence.block_table = prefix
        self._mirror(sequence, 0)
        sequence.num_computed_tokens = len(prefix) * self.blocks.block_size
        self.tables.num_computed[slot] = sequence.num_computed_tokens
        for sibling in siblings:
            self.tables.copy_tokens(slot, self._take_slot(sibling))

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give `sequence` blocks until they hold `num_tokens`. Raises `ValueError` when too few are available."""
        held = len(sequence.block_table)
        wanted = self.blocks_for(num_tokens) - held
        sequence.block_table += self.blocks.allocate(wanted, sequence.request.tenant)
        self._mirror(sequence, held)

    def grow_by_one(self, sequences: Items[Sequence], slots: Index) -> None:
        """Give each of `sequences` its next block: `grow` for many decoding sequences at once."""
        tables, size = self.tables, self.blocks.block_size
        taken = self.blocks.allocate_each([sequence.request.tenant for sequence in sequences])
        for sequence, block in zip(sequences, taken, strict=True):
            sequence.block_table.append(block)
        capacity = tables.capacity[slots]
        tables.flat_blocks[slots * tables.blocks.shape[1] + capacity // size] = taken
        tables.capacity[slots] = capacity + size

    def fork(self, leader: Sequence, sibling: Sequence) -> None:
        """Let `sibling`, which has its slot already, share all blocks of `leader`."""
        sibling.block_table = self.blocks.fork(leader.block_table)
        sibling.block_hashes = leader.block_hashes.copy()
        sibling.num_computed_tokens = leader.num_computed_tokens
        self.tables.copy_blocks(leader.slot, sibling.slot, len(leader.block_table))

    def shares_block(self, sequence: Sequence, position: int) -> bool:
        """Whether others hold the block of `position` too, so that writing there needs a copy."""
        return self.blocks.is_shared(sequence.block_table[position // self.blocks.block_size])

    def part(self, sequence: Sequence, position: int) -> None:
        """Give `sequence` its own copy of the block of `position`, unless nobody else holds it.

        The copy itself is noted in `copies`. Raises `ValueError` when no block is available.
        """
        index = position // self.blocks.block_size
        copy = self.blocks.writable(sequence.block_table, index, sequence.request.tenant)
        if copy is not None:
            source, target = copy
            self.copies[target] = source
            self.tables.blocks[sequence.slot, index] = target

    def seal(self, sequence: Sequence, before: int, after: int) -> None:
        """Make the blocks findable that `sequence` filled while its computed tokens went from `before` to `after`."""
        size, hashes = self.blocks.block_size, sequence.block_hashes
        first, last = before // size, after // size
        tokens = self.tables.tokens[sequence.slot, : last * size].tobytes()
        extend_hashes(hashes, tokens, size, root_hash(sequence.request.cache_salt))
        width = size * TOKEN_BYTES
        for i in range(first, last):
            self.blocks.seal(sequence.block_table[i], hashes[i], tokens[i * width : (i + 1) * width])

    def seal_last(self, sequences: Items[Sequence], slots: Index, computed: Ints) -> None:
        """Make findable the block that each of `sequences` filled with its last computed token.

        `seal` for many decoding sequences at once: their tokens are gathered together. computed: [sequences].
        Can be repeated, should it have failed half-way.
        """
        size = self.blocks.block_size
        first = slots * self.tables.context_len + computed - size
        tokens = self.tables.flat_tokens[first[:, None] + np.arange(size)].tobytes()
        width = size * TOKEN_BYTES
        contents = [tokens[start : start + width] for start in range(0, len(tokens), width)]
        for sequence, index, content in zip(sequences, (computed // size - 1).tolist(), contents, strict=True):
            hashes = sequence.block_hashes
            if len(hashes) == index:
                hashes.append(block_hash(hashes[-1] if hashes else root_hash(sequence.request.cache_salt), content))
            self.blocks.seal(sequence.block_table[index], hashes[index], content)

    def leave(self, sequence: Sequence) -> None:
        """Take back slot and blocks. The tokens are gone afterwards; a slot-less sequence is left as it is."""
        if sequence.slot < 0:
            return
        self._ledger.leaves(sequence)
        self.blocks.release(sequence.block_table)
        self.tables.clear(sequence.slot)
        self._stops.unwatch(sequence.request)
        self._num_structured -= sequence.grammar is not None
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def check_integrity(self, placed: Items[Sequence]) -> None:
        """Check blocks, tables and slots against the sequences that hold a slot. Raises `IntegrityError`."""
        self.blocks.check_integrity(sequence.block_table for sequence in placed)
        self._stops.check_integrity(sequence.request for sequence in placed)
        if self._num_structured != sum(sequence.grammar is not None for sequence in placed):
            raise IntegrityError("sequences with a grammar are miscounted")
        slots = sorted(self._free_slots + [sequence.slot for sequence in placed])
        if slots != list(range(self.tables.num_slots)):
            raise IntegrityError("free and used slots are not all slots, each once")
        for slot in self._free_slots:
            if self.tables.tokens[slot].any() or self.tables.blocks[slot].any() or self.tables.num_tokens[slot]:
                raise IntegrityError(f"slot {slot} is free, but not zeroed")
        for sequence in placed:
            self._check_row(sequence)

    def _check_row(self, sequence: Sequence) -> None:
        tables, slot, held = self.tables, sequence.slot, len(sequence.block_table)
        if tables.blocks[slot, :held].tolist() != sequence.block_table or tables.blocks[slot, held:].any():
            raise IntegrityError(f"block table and slot {slot} differ")
        if tables.capacity[slot] != held * self.blocks.block_size:
            raise IntegrityError(f"slot {slot} has a wrong capacity")
        if tables.num_tokens[slot] != sequence.num_tokens or tables.tokens[slot, sequence.num_tokens :].any():
            raise IntegrityError(f"slot {slot} has a wrong number of tokens")
        if tables.num_computed[slot] != sequence.num_computed_tokens:
            raise IntegrityError(f"slot {slot} has a wrong number of computed tokens")
        if not sequence.num_computed_tokens <= tables.capacity[slot]:
            raise IntegrityError(f"slot {slot} has computed more tokens than its blocks hold")

    def _take_slot(self, sequence: Sequence) -> int:
        slot = sequence.slot = self._free_slots.pop()
        self._stops.watch(sequence.request)
        self._num_structured += sequence.grammar is not None
        self._params.write(slot, sequence, self._stops.of(sequence.request))
        return slot

    def _mirror(self, sequence: Sequence, start: int) -> None:
        slot, table = sequence.slot, sequence.block_table
        self.tables.blocks[slot, start : len(table)] = table[start:]
        self.tables.capacity[slot] = len(table) * self.blocks.block_size
