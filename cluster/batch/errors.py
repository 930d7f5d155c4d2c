"""Why a batch cannot go on. All of them leave what was done in place: the same command goes on from there."""

from __future__ import annotations

from engine.errors import SquadronError


class BatchError(SquadronError):
    """A batch cannot start or go on; the message says what to do."""


class InputError(BatchError):
    """The input as a whole cannot be used: not there, unreadable, or its rows cannot be told apart."""


class UnreachableError(InputError):
    """The input, or the disk for its ids, cannot be reached now: nothing is wrong with what the input holds."""


class LedgerError(BatchError):
    """The ledger cannot be read or written, or belongs to other work."""


class BusyError(LedgerError):
    """Another driver works on the same output."""


class FencedError(LedgerError):
    """Another driver has taken the output over; this one must stop."""
