"""The memory of running sequences: a slot in the tables, and the KV blocks in its row of the block table."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from engine.errors import IntegrityError
from engine.events import BlocksTaken, Events, Left
from engine.kv.block_manager import TOKEN_BYTES, BlockManager, block_hashes, extend_hashes, root_hash, token_bytes
from engine.report import Ints
from engine.request import Request, Sequence
from engine.sampling.parameter_table import SamplingTable
from engine.scheduler.schedule import ONE_PLACE, Index, RowBlocks
from engine.scheduler.states import States


class SlotTables:
    """Tokens, blocks and counts by slot (S slots, K blocks of a context, M tokens of them). A free slot is all zeros.

    tokens: prompt and output so far; what lies beyond `num_tokens` is zero.
    blocks: physical block of each logical block; 0 = none.
    block_tokens: the tokens of each logical block, in the places that `flat_blocks` has for their blocks.
    progress: `num_tokens` and `num_computed`, which steps move. [2, S]
    num_prompt / num_tokens / num_computed: prompt; prompt + output; tokens whose K/V are in the cache.
    limits: `num_tokens` at which the sequence must end.
    num_blocks: blocks that it holds.
    """

    def __init__(self, num_slots: int, context_len: int, block_size: int) -> None:
        """block_size: a power of two."""
        self.num_slots = num_slots
        self.block_size = block_size
        self.shift = block_size.bit_length() - 1  # token >> shift = its block
        self.blocks_per_slot = -(-context_len // block_size)  # K
        self.tokens_per_slot = self.blocks_per_slot * block_size  # M
        self.tokens: Ints = np.zeros((num_slots, self.tokens_per_slot), "<i4")  # [S, M]
        self.blocks: Ints = np.zeros((num_slots, self.blocks_per_slot), np.int32)  # [S, K]
        self._counts: Ints = np.zeros((5, num_slots), np.int32)
        self.progress = self._counts[:2]
        self.num_tokens, self.num_computed, self.num_prompt, self.limits, self.num_blocks = self._counts
        self.flat_tokens: Ints = self.tokens.reshape(-1)  # [S * M], a view
        self.flat_blocks: Ints = self.blocks.reshape(-1)  # [S * K], a view
        self.block_tokens: NDArray[np.void] = self.flat_tokens.view(f"V{block_size * TOKEN_BYTES}")  # [S * K], a view

    def fill(self, slot: int, prompt: Items[int], outputs: Items[int], limit: int) -> None:
        """Write a sequence that is admitted: the whole prompt at once, and the outputs known from before."""
        total = len(prompt) + len(outputs)
        self.num_prompt[slot] = len(prompt)
        self.num_tokens[slot] = total  # before the tokens: `clear` must find them even if writing them fails
        self.limits[slot] = limit
        self.tokens[slot, : len(prompt)] = prompt
        self.tokens[slot, len(prompt) : total] = outputs

    def copy_tokens(self, source: int, target: int) -> None:
        """Write the sequence in slot `source` into slot `target` as well, without its blocks."""
        total = self.num_tokens[source]
        self.tokens[target, :total] = self.tokens[source, :total]
        for counts in (self.num_prompt, self.num_tokens, self.limits):
            counts[target] = counts[source]

    def copy_blocks(self, source: int, target: int) -> None:
        """Let slot `target` see the blocks of slot `source`, and all that is computed in them."""
        self.blocks[target] = self.blocks[source]
        for counts in (self.num_computed, self.num_blocks):
            counts[target] = counts[source]

    def append_blocks(self, slot: int, blocks: Items[int]) -> None:
        """Add blocks to the end of a row."""
        held = int(self.num_blocks[slot])
        self.blocks[slot, held : held + len(blocks)] = blocks
        self.num_blocks[slot] = held + len(blocks)

    def held_blocks(self, slot: int) -> list[int]:
        """Return the block table of a slot, in logical order."""
        return self.blocks[slot, : self.num_blocks[slot]].tolist()

    def outputs(self, slot: int, beyond: int) -> list[int]:
        """Return the tokens generated so far, up to position `beyond`."""
        return self.tokens[slot, self.num_prompt[slot] : beyond].tolist()

    def clear(self, slot: int) -> None:
        """Zero the row, so that nothing of its sequence can reach the next one."""
        self.tokens[slot, : self.num_tokens[slot]] = 0
        self.blocks[slot] = 0
        self._counts[:, slot] = 0


class StopTokens:
    """Finds in one gather the tokens of a step that could end a sequence; the few hits are then checked one by one.

    The `stop_token_ids` of all placed sequences are watched, and the end-of-sequence ids always.
    """

    def __init__(self, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._watchers: Ints = np.zeros(vocab_size, np.int32)
        self._watchers[list(self.eos_token_ids)] = 1
        self._watched: NDArray[np.bool_] = self._watchers > 0

    def of(self, request: Request) -> tuple[int, ...]:
        """Return all ids that end this request."""
        params = request.params
        return params.stop_token_ids if params.ignore_eos else self.eos_token_ids + params.stop_token_ids

    def watch(self, request: Request, change: int = 1) -> None:
        """Count the stop ids of a sequence of `request` that starts to run. change: -1 when it leaves."""
        for token in request.params.stop_token_ids:
            self._watchers[token] += change
            self._watched[token] = self._watchers[token] > 0

    def hits(self, token_ids: Ints) -> NDArray[np.bool_]:
        """Return which tokens are watched. [num_samples] -> [num_samples]."""
        return self._watched.take(token_ids)

    def check_integrity(self, watching: Iterable[Request]) -> None:
        """Raise `IntegrityError` unless exactly these sequences' requests are watched for. O(vocabulary)."""
        expected = np.zeros_like(self._watchers)
        expected[list(self.eos_token_ids)] = 1
        for request in watching:
            np.add.at(expected, np.array(request.params.stop_token_ids, np.intp), 1)
        if not (np.array_equal(expected, self._watchers) and np.array_equal(expected > 0, self._watched)):
            raise IntegrityError("stop ids are watched for sequences that left, or not for some that run")


class Slots:
    """Places sequences in slots, allocates, shares and frees their blocks.

    The row of a slot is the only block table of its sequence. Used by the scheduler only; one thread.
    events: of blocks that are taken and given back. states: of a model that keeps recurrent ones, else None.
    """

    def __init__(
        self,
        tables: SlotTables,
        params: SamplingTable,
        pool: BlockManager,
        stops: StopTokens,
        events: Events,
        states: States | None = None,
    ) -> None:
        self.tables = tables
        self.pool = pool
        self.stops = stops
        self.states = states
        self._params = params
        self._events = events
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
    def num_free(self) -> int:
        """Sequences that can still be placed."""
        return len(self._free_slots)

    def capacity(self, slots: Index) -> Ints:
        """Return the tokens that the blocks of each slot hold. [slots]."""
        return self.tables.num_blocks[slots] * self.pool.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens`."""
        return -(-num_tokens // self.pool.block_size)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks a placed sequence lacks to hold `num_tokens`."""
        return self.blocks_for(num_tokens) - int(self.tables.num_blocks[sequence.slot])

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks that `sequence` can start with (not held yet).

        The block of the last known token is never among them: its logits are wanted, and computing one block again
        costs less than a copy-on-write of a block that others read.
        """
        if not self.pool.enable_prefix_caching:
            return []
        request, size = sequence.request, self.pool.block_size
        tokens = token_bytes(request.prompt_token_ids) + token_bytes(sequence.resume_tokens)
        extend_hashes(sequence.block_hashes, tokens, size, root_hash(request.cache_salt))
        found = self.pool.match(sequence.block_hashes[: sequence.num_reusable_tokens // size], tokens)
        if self.states is not None:
            del found[self.states.deepest(sequence.block_hashes[: len(found)]) :]
        return found

    def extend_prefix(self, sequence: Sequence, found: int) -> list[int]:
        """Return the cached blocks behind the first `found`, which `find_prefix` returned before. O(returned).

        Of a model with recurrent states none: blocks alone are not enough to start with.
        """
        if self.states is not None:
            return []
        hashes, size = sequence.block_hashes, self.pool.block_size
        most = min(len(hashes), sequence.num_reusable_tokens // size) if self.pool.enable_prefix_caching else 0
        beyond = found
        while beyond < most and self.pool.knows(hashes[beyond]):
            beyond += 1
        if beyond == found:
            return []
        return self.pool.match(hashes[found:beyond], token_bytes(sequence.known_tokens(found * size, beyond * size)))

    def place(self, sequence: Sequence, siblings: Items[Sequence], prefix: list[int], limit: int) -> None:
        """Give `sequence` a slot with all its tokens, and the blocks of `prefix`; keep slots for its siblings."""
        slot = self._take_slot(sequence)
        self.tables.fill(slot, sequence.request.prompt_token_ids, sequence.resume_tokens, limit)
        sequence.tables = self.tables
        if prefix:
            self._taken(sequence, self.pool.acquire(prefix))
            self.tables.append_blocks(slot, prefix)
        self.tables.num_computed[slot] = len(prefix) * self.pool.block_size
        if self.states is not None:
            self.states.start(slot, sequence.block_hashes[len(prefix) - 1] if prefix else None)
        for sibling in siblings:
            self.tables.copy_tokens(slot, self._take_slot(sibling))
            sibling.tables = self.tables

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give `sequence` blocks until they hold `num_tokens`. Raises `ValueError` when too few are available."""
        wanted = self.missing_blocks(sequence, num_tokens)
        if wanted > 0:
            blocks = self.pool.allocate(wanted)
            self._taken(sequence, blocks)
            self.tables.append_blocks(sequence.slot, blocks)

    def grow_by_one(self, new: RowBlocks) -> Ints:
        """Give decoding sequences the blocks at the places of `new`, each its next one; return these, [new].

        `grow` for many sequences at once.
        """
        blocks = self.pool.allocate(len(new.sequences))
        self._events.emit(BlocksTaken(new.sequences, blocks))
        numbers: Ints = np.array(blocks, np.int32)
        self.tables.flat_blocks[new.places] = numbers
        self.tables.num_blocks[new.slots] = new.columns + ONE_PLACE
        return numbers

    def fork(self, leader: Sequence, sibling: Sequence) -> None:
        """Let `sibling`, which has its slot already, share all blocks of `leader`."""
        self.pool.acquire(leader.block_table)
        self.tables.copy_blocks(leader.slot, sibling.slot)
        sibling.block_hashes = leader.block_hashes.copy()
        if self.states is not None:
            self.states.share(sibling.slot)

    def shares_block(self, sequence: Sequence, position: int) -> bool:
        """Whether others hold the block of `position` too, so that writing there needs a copy."""
        block = self.tables.blocks[sequence.slot, position // self.pool.block_size]
        return self.pool.is_shared(int(block))

    def part(self, sequence: Sequence, position: int) -> None:
        """Give `sequence` its own copy of the block of `position`, unless no other holds it.

        The copy itself is noted in `copies`. Raises `ValueError` when no block is available.
        """
        place = sequence.slot, position // self.pool.block_size
        source = int(self.tables.blocks[place])
        target = self.pool.part(source)
        if target is not None:
            self._taken(sequence, [target])
            self.copies[target] = source
            self.tables.blocks[place] = target

    def seal(self, sequence: Sequence, before: int, after: int) -> None:
        """Make the blocks findable that `sequence` filled while its computed tokens went from `before` to `after`."""
        size, hashes = self.pool.block_size, sequence.block_hashes
        first, last = before // size, after // size
        tokens = self.tables.tokens[sequence.slot, : last * size].tobytes()
        extend_hashes(hashes, tokens, size, root_hash(sequence.request.cache_salt))
        width, blocks = size * TOKEN_BYTES, self.tables.blocks[sequence.slot, first:last].tolist()
        contents = [tokens[start : start + width] for start in range(first * width, last * width, width)]
        self.pool.seal(blocks, hashes[first:last], contents)

    def last_blocks(self, sequences: Items[Sequence], slots: Index, computed: Ints, rows: Index) -> RowBlocks:
        """Return the full blocks that end with the last computed token of some sequences.

        computed: tokens of each, [sequences]. rows: where this is a multiple of a block.
        """
        tables = self.tables
        slots = slots[rows]
        columns = (computed[rows] >> tables.shift) - 1
        places = slots * tables.blocks_per_slot + columns
        owners = [sequences[row] for row in rows.tolist()]
        return RowBlocks(rows, owners, [one.block_hashes for one in owners], slots, columns, places)

    def seal_last(self, full: RowBlocks) -> None:
        """Make full blocks findable: `seal` for many decoding sequences at once.

        Can be repeated, should it have failed half-way.
        """
        size, chains, columns = self.pool.block_size, full.chains, full.columns.tolist()
        if list(map(len, chains)) != columns:  # some were named before they were computed
            for sequence, column in zip(full.sequences, columns, strict=True):
                self.seal(sequence, column * size, (column + 1) * size)
            return
        contents = self.tables.block_tokens[full.places].tolist()
        parents = [
            chain[-1] if chain else root_hash(sequence.request.cache_salt)
            for chain, sequence in zip(chains, full.sequences, strict=True)
        ]
        digests = block_hashes(parents, contents)
        for chain, digest in zip(chains, digests, strict=True):
            chain.append(digest)
        self.pool.seal(self.tables.flat_blocks[full.places].tolist(), digests, contents)

    def leave(self, sequence: Sequence) -> None:
        """Take back slot and blocks. The tokens are gone afterwards; a slot-less sequence is left as it is."""
        slot = sequence.slot
        if slot < 0:
            return
        self._events.emit(Left(sequence, slot, self.pool.release(self.tables.held_blocks(slot))))
        sequence.num_known = sequence.num_tokens
        self.tables.clear(slot)
        if self.states is not None:
            self.states.leave(slot)
        self.stops.watch(sequence.request, -1)
        self._num_structured -= sequence.grammar is not None
        self._free_slots.append(slot)
        sequence.slot, sequence.tables = -1, None

    def check_integrity(self, placed: Items[Sequence]) -> None:
        """Check blocks, tables and slots against the sequences that hold a slot. Raises `IntegrityError`."""
        self.pool.check_integrity(sequence.block_table for sequence in placed)
        self.stops.check_integrity(sequence.request for sequence in placed)
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
        if self.states is not None:
            self.states.check_integrity(placed)

    def _check_row(self, sequence: Sequence) -> None:
        tables, slot = self.tables, sequence.slot
        if tables.blocks[slot, tables.num_blocks[slot] :].any():
            raise IntegrityError(f"slot {slot} has blocks beyond its block table")
        if tables.tokens[slot, tables.num_tokens[slot] :].any():
            raise IntegrityError(f"slot {slot} has a wrong number of tokens")
        if (
            not 0
            <= tables.num_computed[slot]
            <= min(tables.num_tokens[slot], int(tables.num_blocks[slot]) * self.pool.block_size)
        ):
            raise IntegrityError(f"slot {slot} has computed more tokens than it has, or than its blocks hold")

    def _take_slot(self, sequence: Sequence) -> int:
        slot = sequence.slot = self._free_slots.pop()
        self.stops.watch(sequence.request)
        self._num_structured += sequence.grammar is not None
        self._params.write(slot, sequence, self.stops.of(sequence.request))
        return slot

    def _taken(self, sequence: Sequence, blocks: list[int]) -> None:
        self._events.emit(BlocksTaken((sequence,), blocks))
