"""What rows pay before they begin: those of a server's batches to the quotas of their tenant, others nothing."""

from __future__ import annotations

from typing import Protocol

from cluster.batch.ledger.records import RowDone
from cluster.batch.prepare import Prepared


class Toll(Protocol):
    """Of one batch."""

    async def pay(self, prepared: Prepared, expected: int) -> None:
        """Return when a row may begin. expected: tokens that it is likely to take, its prompts included.

        Raises `ApiError` for a row that may never begin.
        """
        ...

    async def settle(self, expected: int, done: RowDone) -> None:
        """Take note of what a row took that had paid for `expected`."""
        ...


class NoToll:
    """Rows that nobody is charged for."""

    async def pay(self, prepared: Prepared, expected: int) -> None:
        """Return at once."""

    async def settle(self, expected: int, done: RowDone) -> None:
        """There is nothing to settle."""
