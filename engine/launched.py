"""A step that the device has, and what must be remembered of it until its results are taken in."""

from __future__ import annotations

from dataclasses import dataclass

from engine.executor import Pending
from engine.schedule import Schedule


@dataclass(slots=True)
class Launched:
    """One step on its way. Times are seconds on the engine's clock.

    planned_at / launched_at: when its planning began, and when it was given to the device. tried: seconds spent on
    attempts for which there was no memory. tainted: what it computes must not be found by others, for the cache was
    cleared since it was planned.
    """

    schedule: Schedule
    pending: Pending
    wants_logprobs: bool
    planned_at: float
    launched_at: float
    tried: float = 0.0
    tainted: bool = False
