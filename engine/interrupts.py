"""Ctrl-C between steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class DeferredInterrupt:
    """While this context is open, Ctrl-C waits for the next `check`; a second Ctrl-C does not wait.

    Does nothing outside the main thread, and nothing where the program handles SIGINT in a way of its own.
    """

    def __init__(self) -> None:
        self._asked = False
        self._active = False

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._active = False
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise the `KeyboardInterrupt` that came since the context was opened."""
        if self._asked:
            self._asked = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            signal.default_int_handler(number, frame)
        self._asked = True
