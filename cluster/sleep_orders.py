"""Orders to sleep and to wake: what an operator wants of a model, which its routers and replicas see to.

An order stays until another one takes its place. So replicas that start later carry it out as well, and routers that
start later refuse requests as the others do.
"""

from __future__ import annotations

from collections.abc import Collection
from secrets import token_hex
from typing import Protocol

import msgspec

from engine.worker.sleep import LEVELS, TAGS

# What becomes of requests that run when the order comes; `vLLM`'s words. "" = there should be none, and those that
# come in the same moment are waited for.
KEEP, WAIT, ABORT = MODES = ("keep", "wait", "abort")
ASLEEP = "asleep"  # code of the error of requests that a sleeping model gets


class SleepOrder(msgspec.Struct, frozen=True):
    """What is wanted of a model from now on. ticket: tells orders apart. number: how many there were, with this one.

    asleep: which of `TAGS` are to sleep. level: as of `EngineCore.sleep`; 0 = all is to be awake. mode: one of
    `MODES`, or "".
    """

    ticket: str = ""
    number: int = 0
    level: int = 0
    asleep: tuple[str, ...] = ()
    mode: str = ""

    def sleeping(self, level: int, mode: str) -> SleepOrder:
        """Return the next order, by which all of the model sleeps. level: one of `LEVELS`."""
        if level not in LEVELS:
            raise ValueError(f"level must be 1 or 2, not {level}")
        return SleepOrder(token_hex(8), self.number + 1, level, TAGS, mode)

    def waking(self, tags: Collection[str]) -> SleepOrder:
        """Return the next order, which wakes these parts beside those that are awake."""
        asleep = tuple(tag for tag in self.asleep if tag not in tags)
        return SleepOrder(token_hex(8), self.number + 1, self.level if asleep else 0, asleep, self.mode)


class OrderBook(Protocol):
    """Where the order of one model is kept. Its methods block, and raise `ApiError` (503)."""

    def read(self) -> SleepOrder:
        """Return the order in force."""

    def write(self, order: SleepOrder) -> None:
        """Keep an order in the place of the one before."""
