"""One request's host-side failure stays its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from engine.errors import InvalidRequestError, StepMemoryError
from engine.request import FinishReason, Sequence
from engine.roster import Roster
from engine.wordless import wordless

logger = logging.getLogger(__name__)

NO_MEMORY = "there was no memory to go on with this request beside the others; it may be sent again"


class Boundary:
    """Runs the parts of a step that concern a single sequence, and ends the requests whose part raised."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._broken: list[tuple[Sequence, Exception]] = []

    def guard(self, sequence: Sequence, action: Callable[..., Any], *args: Any) -> Any:
        """Return what `action` returns, or None if it raised: then `bury` will end the request of `sequence`."""
        try:
            return action(*args)
        except Exception as error:
            self.mark(sequence, error)
            return None

    def mark(self, sequence: Sequence, error: Exception) -> None:
        """Note that work for `sequence` failed."""
        self._broken.append((sequence, error))

    def is_marked(self, sequence: Sequence) -> bool:
        """Whether work for the request of `sequence` failed in this step: no part of it may end well any more."""
        return any(broken.request is sequence.request for broken, _ in self._broken)

    def bury(self) -> None:
        """End the marked requests with ERROR. Only where no arrays of a step that hold their rows are in use."""
        while self._broken:
            sequence, error = self._broken.pop()
            request_id = sequence.request.request_id
            about = {"squadron": {"request_id": request_id}}  # fields of the line, where lines have any
            if isinstance(error, InvalidRequestError):
                logger.info("request %s cannot go on: %s", request_id, error.code, extra=about)
                self._roster.finish_request(request_id, FinishReason.ERROR, str(error), error.code)
                continue
            if isinstance(error, StepMemoryError):
                logger.error("request %s is shed: %s", request_id, error, extra=about)
                self._roster.finish_request(request_id, FinishReason.ERROR, NO_MEMORY, error.code)
                continue
            logger.error("request %s failed in the engine", request_id, exc_info=wordless(error), extra=about)
            message = f"the engine failed on this request ({type(error).__name__})"
            self._roster.finish_request(request_id, FinishReason.ERROR, message)
