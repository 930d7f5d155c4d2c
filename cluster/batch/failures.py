"""The first rows that failed, in words: so that whoever looks at the end of a run sees what is wrong."""

from __future__ import annotations

import msgspec

from cluster.batch.ledger.ledger import Totals
from cluster.batch.ledger.records import RowDone
from cluster.batch.rows import Source

MAX_MESSAGE = 200  # characters of each


class _Told(msgspec.Struct, frozen=True):
    message: str


class _Body(msgspec.Struct, frozen=True):
    error: _Told


_decode = msgspec.json.Decoder(_Body).decode


def first_failures(source: Source, totals: Totals) -> list[str]:
    """Return a line for each of `Totals.first_errors`: where the row lies, and why it failed.

    Reads the input up to the last of them. Raises `InputError` when it cannot be read.
    """
    wanted = {done.row: done for done in totals.first_errors}
    found: list[str] = []
    for row in source.rows() if wanted else ():
        if row.number in wanted:
            found.append(f"{row.place}: {_message(wanted[row.number])}")
            if len(found) == len(wanted):
                break
    return found


def _message(done: RowDone) -> str:
    text = " ".join(_decode(done.body).error.message.split())
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
