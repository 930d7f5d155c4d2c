"""Runs checks side by side, each in bounded time and none with a traceback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from deploy.doctor.finding import Finding, fix, warning


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at. look: returns its findings; seconds: after which it counts as hung."""

    name: str
    look: Callable[[], Sequence[Finding]]
    seconds: float = 30.0


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield the findings of all checks in their order; takes as long as the slowest, never longer than its limit."""
    began = time.monotonic()
    answers = [_started(check) for check in checks]
    for check, answer in zip(checks, answers, strict=True):
        left = began + check.seconds - time.monotonic()
        try:
            yield from answer.get(timeout=max(left, 0.0))
        except Empty:
            yield fix(
                check.name,
                f"no answer within {check.seconds:g} s",
                "something that it asks hangs: a disk, a driver, or the network",
            )


def _started(check: Check) -> SimpleQueue[Sequence[Finding]]:
    """Return where the findings will be put. The thread is left behind when it hangs."""
    answer: SimpleQueue[Sequence[Finding]] = SimpleQueue()
    Thread(target=lambda: answer.put(_looked(check)), name=f"doctor-{check.name}", daemon=True).start()
    return answer


def _looked(check: Check) -> Sequence[Finding]:
    try:
        return check.look()
    # Whatever a broken machine makes a check raise is told as a line: the other lines are wanted all the more.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
        return [
            warning(check.name, f"could not be checked ({reason})", "see whether the cause is told by another line")
        ]
