"""What one step is to compute, and whether the step after it can be planned while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from engine.report import Ints
from engine.request import Sequence

Index = NDArray[np.intp]

# Arrays add faster than Python's numbers.
ONE: Ints = np.ones(1, np.int32)
ONE_PLACE: Index = np.ones(1, np.intp)


class Hold(StrEnum):
    """Why a step waits for the results of the one before. All reasons are here.

    A step is planned ahead from what can be counted: every row of the step before computes its tokens, and those that
    draw draw one. What depends on the value of that token holds no step: penalties and bad words of several tokens
    find it on the device, a grammar's mask is filled once it is known, while the model runs.
    """

    FORKS = "forks"  # siblings of n > 1 join when the prompt that they share has been computed
    PROMPTS = "prompts"  # the results for prompts decide whether a request is done, and what is computed again
    DRAWS = "draws"  # rows of the step before may draw several tokens
    BLOCKS = "blocks"  # a sequence would be preempted, though the step that runs may end others and free theirs
    MEMORY = "memory"  # the device has no memory for a second step beside the first (noted by the launcher)


@dataclass(frozen=True, slots=True)
class StateMoves:
    """What a step does with recurrent states, by their slots of the state cache.

    sources: where each row's state is read from, -1 = it is zeros. It is written to the slot of the row's sequence.
    copies: (slot of a row, target) of states that are copied when the step has run. snapshots: (row, target) of those
    of them that can be found later.
    """

    sources: Ints  # [num_reqs]
    copies: list[tuple[int, int]]
    snapshots: list[tuple[int, int]]


@dataclass(slots=True)
class RowBlocks:
    """A block of each of some rows of a step."""

    rows: Index
    sequences: list[Sequence]
    chains: list[list[bytes]]  # `block_hashes` of each
    slots: Index
    columns: Index  # of the block table
    places: Index  # in the flat block table

    def next(self) -> RowBlocks:
        """Return the blocks behind these."""
        if not self.sequences:
            return self
        columns, places = self.columns + ONE_PLACE, self.places + ONE_PLACE
        return RowBlocks(self.rows, self.sequences, self.chains, self.slots, columns, places)


@dataclass(slots=True)
class Continued:
    """What is known of a decode step because it moves the rows of the one before it on by one token.

    No sequence comes to its limit in it.

    token_places / draw_places: in the flat token table, of the tokens that it computes and of those that it draws.
    grown: blocks that sequences got for it, those of `new_blocks`, [grown].
    full: blocks that it fills.
    longest: the largest of `seq_lens`.
    progress: what the step adds to `SlotTables.progress`.
    """

    token_places: Index  # [num_reqs]
    draw_places: Index  # [num_reqs]
    grown: RowBlocks
    new_blocks: Ints
    full: RowBlocks
    longest: int
    progress: Ints


@dataclass(slots=True)
class Schedule:
    """The rows of one step, in running order, and the sequences that draw in it.

    version: equal in two schedules only if `sequences` and `samples` are the same; 0 is never equal to anything.
    decode: every row computes one token and draws, so that rows and samples are the same.
    changed_rows: rows whose block table changed since the last schedule of the same version.
    copies: (source, destination) blocks to copy, in this order, before anything is written.
    forks: sequences whose prompt ends in this step and whose siblings draw from the same logits.
    scores: (sequence, first, beyond) positions whose logits give the log-probability of the prompt's next token.
    pooled: (sequence, row) of those whose hidden states are wanted and not yet summed up.
    carried: (row, sample of the step before) of rows whose one token is drawn by that step, which still runs.
    most_draws: tokens that a sample may draw at most; how many it did is a result of the step.
    gone: sequences that left since the step was launched; they get nothing of it.
    states: what is done with recurrent states; None where the model keeps none.
    continued: of a step that a `DecodeRun` planned; None of all others.
    """

    sequences: list[Sequence]
    slots: Index  # [num_reqs]
    query_lens: Ints  # [num_reqs]
    num_computed: Ints  # [num_reqs]  before the step
    seq_lens: Ints  # [num_reqs]  after the step
    samples: list[Sequence]
    sample_rows: Index  # [num_samples]  row of each sample
    sample_slots: Index  # [num_samples]
    sample_positions: Ints  # [num_samples]  of the first token that each draws
    num_tokens: int
    version: int = 0
    decode: bool = False
    changed_rows: Index | None = None
    copies: Items[tuple[int, int]] = ()
    forks: Items[Sequence] = ()
    scores: Items[tuple[Sequence, int, int]] = ()
    pooled: Items[tuple[Sequence, int]] = ()
    carried: Ints | None = None  # [num_carried, 2]
    most_draws: int = 1
    gone: set[Sequence] = field(default_factory=set)
    states: StateMoves | None = None
    continued: Continued | None = None
    _drawing: set[Sequence] = field(default_factory=set)  # `samples`, once they were asked for

    @property
    def is_unwanted(self) -> bool:
        """Whether all that it computes for have left."""
        return bool(self.gone) and self.gone.issuperset(self.sequences) and self.gone.issuperset(self.samples)

    @property
    def holds_next(self) -> Hold | None:
        """Why no step can be planned while this one runs; None where one can, if there are blocks for it."""
        if self.forks:
            return Hold.FORKS
        if self.scores or self.pooled:
            return Hold.PROMPTS
        return Hold.DRAWS if self.most_draws > 1 else None

    def draws_for(self, sequence: Sequence) -> bool:
        """Whether it draws a token that `sequence` is still there to get."""
        if not self._drawing:
            self._drawing.update(self.samples)
        return sequence in self._drawing and sequence not in self.gone

    def kept_samples(self) -> Index:
        """Return the samples of those that are still there."""
        return np.array([row for row, sequence in enumerate(self.samples) if sequence not in self.gone], np.intp)

    def read_prompts(self) -> None:
        """Note what is wanted of prompts beside their next token: log-probabilities, hidden states."""
        scores: list[tuple[Sequence, int, int]] = []
        pooled: list[tuple[Sequence, int]] = []
        for row, sequence in enumerate(self.sequences):
            computed, beyond = int(self.num_computed[row]), int(self.seq_lens[row])
            if not sequence.reads_prompt or computed >= sequence.num_prompt_tokens:
                continue
            if sequence.request.pooling is not None:
                if beyond == sequence.num_prompt_tokens or sequence.request.pooling == "mean":
                    pooled.append((sequence, row))
            else:
                first = max(computed, sequence.num_scored_tokens - 1)
                beyond = min(beyond, sequence.num_prompt_tokens - 1)
                if beyond > first:
                    scores.append((sequence, first, beyond))
        self.scores, self.pooled = scores, pooled

    def choose_samples(self, rows: Index, siblings: Mapping[Sequence, list[Sequence]]) -> None:
        """Let those draw whose last token is computed, in `rows`; a leader draws for its `siblings` too."""
        self.version = 0
        self.num_tokens = int(self.query_lens.sum())
        if not siblings and len(rows) == len(self.sequences):
            return  # all of them draw, as in a decode step
        samples = [self.sequences[row] for row in rows.tolist()]
        self.sample_slots = self.slots[rows]
        self.forks = [leader for leader in samples if leader in siblings] if siblings else ()
        if self.forks:
            families = [[leader, *siblings.get(leader, ())] for leader in samples]
            rows = np.repeat(rows, [len(family) for family in families])
            samples = [sequence for family in families for sequence in family]
            self.sample_slots = np.array([sequence.slot for sequence in samples], np.intp)
        self.samples, self.sample_rows, self.sample_positions = samples, rows, self.seq_lens[rows]

    def carried_from(self, before: Schedule, num_slots: int) -> Ints:
        """Return which rows compute a token that the step `before` draws, and which of its samples that is.

        num_slots: slots that there are. Returns [num_carried, 2].
        """
        kept = before.kept_samples() if before.gone else np.arange(len(before.samples))
        sample_of = np.full(num_slots, -1, np.int32)
        sample_of[before.sample_slots[kept]] = kept
        samples = sample_of[self.slots]
        rows = (samples >= 0).nonzero()[0]
        return np.stack([rows, samples[rows]], axis=1).astype(np.int32)

    def moved_on(self, seq_lens: Ints, known: Continued) -> Schedule:
        """Return the decode step after this one, of the same rows. seq_lens: after it."""
        return Schedule(  # by position, which takes half the time
            self.sequences,
            self.slots,
            self.query_lens,
            self.seq_lens,
            seq_lens,
            self.samples,
            self.sample_rows,
            self.sample_slots,
            seq_lens,
            self.num_tokens,
            self.version,
            True,
            known.grown.rows if known.grown.sequences else None,
            continued=known,
        )

    def alone(self, row: int) -> Schedule:
        """Return the part of this schedule that concerns one of its sequences."""
        drawn = (self.sample_rows == row).nonzero()[0]
        return Schedule(
            sequences=[self.sequences[row]],
            slots=self.slots[row : row + 1],
            query_lens=self.query_lens[row : row + 1],
            num_computed=self.num_computed[row : row + 1],
            seq_lens=self.seq_lens[row : row + 1],
            samples=[self.samples[sample] for sample in drawn.tolist()],
            sample_rows=np.zeros(len(drawn), np.intp),
            sample_slots=self.sample_slots[drawn],
            sample_positions=self.sample_positions[drawn],
            num_tokens=int(self.query_lens[row]),
            decode=self.decode,
            scores=[score for score in self.scores if score[0] is self.sequences[row]],
            pooled=[(sequence, 0) for sequence, of in self.pooled if of == row],
            carried=None if self.carried is None else self.carried[self.carried[:, 0] == row] * (0, 1),
        )
