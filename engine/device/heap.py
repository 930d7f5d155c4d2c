"""The garbage collector's rounds, kept short in processes that must not pause."""

from __future__ import annotations

import gc


def collect_garbage() -> None:
    """Free all garbage now, that among what was left out of the collector's rounds as well. Takes as long as one."""
    settled = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if settled:
        gc.freeze()


def settle_heap() -> None:
    """Collect what is garbage by now, and leave all that lives out of the collector's later rounds.

    For processes of our own, once they have started: a full round over what torch, transformers and Ray have made
    holds up every thread for half a second, and Ray asks for one whenever an actor waits for room. What is frozen and
    ends later is freed as ever, unless it is part of a cycle.
    """
    gc.collect()
    gc.freeze()
