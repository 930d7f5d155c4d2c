"""Whose fault an end was, by its code: spans have the status ERROR where it was ours."""

from __future__ import annotations

from cluster.errors import STATUS_BY_CODE
from cluster.wire.link import DRAINED, ENDS, SLOW_CONSUMER

GIVEN_UP = "given_up"  # why an attempt ended that its replica broke off
QUARANTINED = "request_quarantined"
# A client that reads slowly has the same code as a router that does, and is the one of the two that there is.
OURS = (frozenset(ENDS) - {DRAINED, SLOW_CONSUMER}) | {GIVEN_UP, QUARANTINED}


def is_fault(code: str) -> bool:
    """Whether we failed: an error of 5xx, or a replica that was lost. Not what a client did, nor a drain.

    code: of an error or of a link's end; "" = none.
    """
    return code in OURS or STATUS_BY_CODE.get(code, 0) >= 500
