"""What one step is to compute."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.report import Ints
from engine.request import Sequence

Index = NDArray[np.intp]


@dataclass(slots=True)
class Schedule:
    """The rows of one step, in running order, and the sequences that draw in it.

    version: equal in two schedules only if `sequences` and `samples` are the same; 0 is never equal to anything.
    decode: every row computes one token and draws, so that rows and samples are the same.
    changed_rows: rows whose block table changed since the last schedule of the same version.
    copies: (source, destination) blocks to copy, in this order, before anything is written.
    forks: sequences whose prompt ends in this step and whose siblings draw from the same logits.
    scores: (sequence, first, beyond) positions whose logits tell the log-probability of the prompt's next token.
    pooled: (sequence, row) of those whose hidden states are wanted and not yet summed up.
    carried: (row, sample of the step before) of those whose one token that step draws, which still runs.
    most_draws: tokens that a sample may draw at most; how many it did is a result of the step.
    gone: who left since the step was launched, and wants nothing of it any more.
    """

    sequences: list[Sequence]
    slots: Index  # [num_reqs]
    query_lens: Ints  # [num_reqs]
    num_computed: Ints  # [num_reqs]  before the step
    seq_lens: Ints  # [num_reqs]  after the step
    samples: list[Sequence]
    sample_rows: Index  # [num_samples]  row of each sample
    sample_slots: Index  # [num_samples]
    num_tokens: int
    version: int = 0
    decode: bool = False
    changed_rows: Index | None = None
    copies: list[tuple[int, int]] = field(default_factory=list)
    forks: list[Sequence] = field(default_factory=list)
    scores: list[tuple[Sequence, int, int]] = field(default_factory=list)
    pooled: list[tuple[Sequence, int]] = field(default_factory=list)
    carried: Ints | None = None  # [num_carried, 2]
    most_draws: int = 1
    gone: set[Sequence] = field(default_factory=set)
    _drawing: set[Sequence] = field(default_factory=set)  # `samples`, once they were asked for

    @property
    def sample_positions(self) -> Ints:
        """Position of the first token that each sample draws. [num_samples]."""
        return self.seq_lens if self.decode else self.seq_lens[self.sample_rows]

    @property
    def is_unwanted(self) -> bool:
        """Whether all that it computes for have left."""
        return bool(self.gone) and self.gone.issuperset(self.sequences) and self.gone.issuperset(self.samples)

    def draws_for(self, sequence: Sequence) -> bool:
        """Whether it draws a token that `sequence` is still there to get."""
        if not self._drawing:
            self._drawing.update(self.samples)
        return sequence in self._drawing and sequence not in self.gone

    def kept_samples(self) -> Index:
        """Return the samples of those that are still there."""
        return np.array([row for row, sequence in enumerate(self.samples) if sequence not in self.gone], np.intp)

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
            num_tokens=int(self.query_lens[row]),
            decode=self.decode,
            scores=[score for score in self.scores if score[0] is self.sequences[row]],
            pooled=[(sequence, 0) for sequence, of in self.pooled if of == row],
            carried=None if self.carried is None else self.carried[self.carried[:, 0] == row] * (0, 1),
        )
