"""How long things took, for whoever shows it: phases of a sequence, a rank's part of a step. Seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The life of a sequence in this engine, from its arrival to its last token; the three parts are all of it.

    queue: until it first ran, what its output must match being compiled included. prefill: until it drew its first
    token here, or its pooled state was whole. decode: until the last step that ran while it lived, time that it
    waited after a preemption included.
    """

    queue: float
    prefill: float
    decode: float

    @property
    def inference(self) -> float:
        """From when it first ran."""
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One step as a worker rank saw it: the wait for the driver's word, and its part of the model."""

    waited: float
    ran: float
