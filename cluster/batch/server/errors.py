"""What can be wrong with what is kept."""

from __future__ import annotations

from cluster.batch.errors import BatchError


class StoreError(BatchError):
    """Something that is kept cannot be read; the message names it."""


class IllegalChangeError(BatchError):
    """A batch cannot come from the status that it has to another one: a bug of ours, never a client's fault."""
