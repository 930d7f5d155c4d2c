"""What the other side knows of the block table, so that only the entries that changed are sent to it."""

from __future__ import annotations

import numpy as np

from engine.report import Ints


class TableMirror:
    """A block table that lives across steps, [rows, width] int32, zero at first; the same on both sides of a way.

    The sender asks for `changes`, the other side takes them in with `apply`; both then hold the same. What is sent
    is found by comparing, so that no step needs to know of the one before: one that was prepared and never run, or
    prepared twice, does no harm.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.table: Ints = np.zeros((rows, width), np.int32)
        self._flat: Ints = self.table.reshape(-1)  # a view

    def changes(self, rows: Ints, tables: Ints) -> Ints:
        """Return the entries of `tables` that are not as in `rows` of the table, and take them in.

        rows: [num_reqs], none twice. tables: [num_reqs, some columns, at most the width].
        Returns [2, num_changes]: places in the flat table, ascending within a row, and values.
        """
        count = tables.shape[1]
        changed = np.flatnonzero(self.read(rows, count) != tables)
        at, columns = np.divmod(changed, count)
        found: Ints = np.empty((2, len(changed)), np.int32)
        found[0] = rows[at] * self.table.shape[1] + columns
        found[1] = tables.take(changed)
        self.apply(found)
        return found

    def apply(self, changes: Ints) -> None:
        """Take in what `changes` returned on the other side."""
        self._flat[changes[0]] = changes[1]

    def read(self, rows: Ints, count: int) -> Ints:
        """Return the first `count` columns of `rows`, a copy."""
        return self.table[:, :count].take(rows, axis=0)
