"""What waits in front of the replicas, as routers tell it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """What waits at a gate. tokens: of prompts and expected output. age: seconds that the first has waited.

    rate: tokens per second that the queue drains by, 0 while that is not known.
    """

    requests: int = 0
    tokens: int = 0
    age: float = 0.0
    rate: float = 0.0


def together(queues: Iterable[QueueFigures]) -> QueueFigures:
    """Return the figures of all queues as of one."""
    all_of_them = list(queues)
    return QueueFigures(
        sum(one.requests for one in all_of_them),
        sum(one.tokens for one in all_of_them),
        max((one.age for one in all_of_them), default=0.0),
        sum(one.rate for one in all_of_them),
    )
