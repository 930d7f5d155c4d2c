"""Runs a batch's driver on an event loop of its own, until it is done or told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from cluster.tasks import first_error
from deploy.cli.interrupts import SIGNALS, Interrupted, end_now
from engine.device.heap import settle_heap


def run_until_told(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work()` to its end. Raises its error, or `Interrupted` after the first Ctrl-C or SIGTERM.

    Told to stop, the work is cancelled and may write down what it has; a second signal ends the process at once.
    """
    told: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work())

        def stop(number: int) -> None:
            if told:
                end_now(128 + number)
            told.append(number)
            task.cancel()

        settle_heap()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        if not told:
            raise
        raise Interrupted(told[0]) from None
    except BaseExceptionGroup as group:
        raise first_error(group) from group
