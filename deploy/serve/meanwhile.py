"""Work that a thread does while the main thread waits for other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Meanwhile:
    """Runs `work` in a thread from where it is entered to where it is left, which waits for its end.

    So no thread is in the middle of an import when the interpreter ends, which can crash in C++.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="meanwhile", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join()

    def wait(self) -> None:
        """Return when the work is done. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # it is raised again in the thread that waits
            self._error = error
