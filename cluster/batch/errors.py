"""Errors of a batch. All of them leave what was done in place: the same command goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import SquadronError


class BatchError(SquadronError):
    """A batch cannot start or go on; the message says what to do."""


class InputError(BatchError):
    """The input as a whole cannot be used: not there, unreadable, or its rows have no distinct ids."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why a row makes its whole input unusable; the text names its place. line: of its file, from 1."""

    text: str
    line: int | None


class RowFaultsError(InputError):
    """Rows have no distinct ids, or are refused as they are. faults: the first of them; more: how many others."""

    def __init__(self, faults: Sequence[RowFault], more: int) -> None:
        rest = [f"and {more} more"] if more else []
        super().__init__("\n".join(["the input cannot be used:", *(one.text for one in faults), *rest]))
        self.faults = tuple(faults)
        self.more = more


class UnreachableError(InputError):
    """The input, or the disk for its ids, cannot be reached now: nothing is wrong with what the input holds."""


class TooManyErrorsError(BatchError):
    """More rows have failed than are tolerated."""


class LedgerError(BatchError):
    """The ledger cannot be read or written, or belongs to other work."""


class BusyError(LedgerError):
    """Another driver works on the same output."""


class FencedError(LedgerError):
    """Another driver has taken the output over; this one must stop."""


class StoreError(BatchError):
    """Something that is kept cannot be read; the message names it."""


class IllegalChangeError(BatchError):
    """A batch cannot come from the status that it has to another one: a bug of ours, never a client's fault."""
