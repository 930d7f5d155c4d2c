"""Events of the engine: sequences wait, run and end, and take and free KV blocks.

The engine explains no waits and keeps no accounts: a listener is called with each event as it happens
(`EngineCore.call_on_event`). Times are seconds on the engine's clock.

No event is changed once it was emitted. Those of every step are not frozen: that takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from engine.report import Finish, Ints
from engine.request import Request, Sequence


class Lack(StrEnum):
    """What the first waiting sequence lacks to start."""

    BUDGET = "budget"  # tokens of a step: those of others use all of them up
    SLOTS = "slots"  # a place among `max_num_seqs`
    BLOCKS = "blocks"  # free KV blocks


@dataclass(frozen=True, slots=True)
class Began:
    """The engine exists, with so many devices and KV blocks (the null block excluded). The first event."""

    at: float
    num_devices: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Added:
    """A request waits for its first step."""

    request: Request
    at: float


@dataclass(frozen=True, slots=True)
class Stalled:
    """The first waiting request cannot start. Emitted when the request or the reason changes."""

    request: Request
    at: float
    lack: Lack
    detail: str


@dataclass(frozen=True, slots=True)
class Crowded:
    """A step was scheduled and some sequences still wait."""

    at: float


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence runs from here on, for the first time or again."""

    sequence: Sequence
    at: float


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running sequence waits again: its blocks were taken."""

    request: Request
    at: float


@dataclass(frozen=True, slots=True)
class Starved:
    """These run and compute nothing in this step; all others of the last `Starved` compute again."""

    requests: tuple[Request, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence has ended, and the report of this step says so."""

    finish: Finish


@dataclass(slots=True)
class BlocksTaken:
    """Sequences took blocks that no sequence held: each the block at its place, or a single one all of them."""

    sequences: Items[Sequence]
    blocks: Items[int]


@dataclass(frozen=True, slots=True)
class Left:
    """A sequence gave up its slot. freed: those of its blocks that no sequence holds any more."""

    sequence: Sequence
    slot: int
    freed: Items[int]


@dataclass(slots=True)
class Idle:
    """No step ran since the last `Idle` or `Ran`."""

    until: float


@dataclass(frozen=True, slots=True)
class Shares:
    """The sequences that hold blocks while a step runs. num_tokens: what each computes in it.

    num_blocks: blocks that the sequence in each slot holds, as they are whenever the array is read.
    """

    sequences: list[Sequence]
    slots: NDArray[np.intp]  # [sequences]
    num_tokens: Ints  # [sequences]
    num_blocks: Ints  # [S]


@dataclass(slots=True)
class Ran:
    """A step ran since the last `Idle` or `Ran`; emitted before any blocks are freed because of it.

    shares: None = those of the last `Ran`. left: sequences that left meanwhile and whose end is not reported yet,
    with the tokens that each computed in the step.
    """

    until: float
    shares: Shares | None
    left: tuple[tuple[Sequence, int], ...] = ()


EngineEvent = (
    Began | Added | Stalled | Crowded | Started | Preempted | Starved | Ended | BlocksTaken | Left | Idle | Ran
)
OnEvent = Callable[[EngineEvent], None]


class Events:
    """Where the events of one engine go: all that emit them share this, and `emit` may be replaced."""

    def __init__(self, emit: OnEvent) -> None:
        self.emit = emit
