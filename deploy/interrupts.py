"""Ctrl-C and SIGTERM: the first ends the command in good order, the second at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Self

from deploy.local_ray import descendants, kill_all

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The command was told to stop; not an `Exception`, so that no library takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """While entered, the first signal raises `Interrupted` in the main thread.

    Once `stopping` is set, or after the first, a signal kills everything that this process started and ends it.
    """

    def __init__(self) -> None:
        self.stopping = False

    def __enter__(self) -> Self:
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def listen(self) -> None:
        """Take the signals; again after a library has put handlers of its own in place."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            kill_all(descendants())
            os._exit(128 + number)
        self.stopping = True
        raise Interrupted(number)
