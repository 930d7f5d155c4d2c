"""One request's host-side failure stays its own, and a bug of ours nobody's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from engine.errors import GrammarError, IntegrityError, InvalidRequestError, PoisonedLogitsError, StepMemoryError
from engine.request import FinishReason, Sequence
from engine.scheduler.roster import Roster
from engine.telemetry.wordless import wordless

logger = logging.getLogger(__name__)

OWN = (InvalidRequestError, GrammarError, PoisonedLogitsError, StepMemoryError)  # what a request alone may fail of


class Boundary:
    """Runs the parts of a step that concern a single sequence, and ends the requests whose part raised.

    An `IntegrityError` is never one request's: it is passed on, and the engine ends. Any other error that is not
    known for a request's own is a bug of ours; where the part changes what all sequences share, it may have left
    that half changed. Then the request ends, and everything is `in_doubt` until somebody has looked at it.
    """

    def __init__(self, roster: Roster) -> None:
        self.in_doubt = False
        self._roster = roster
        self._broken: list[tuple[Sequence, Exception]] = []

    def guard(self, sequence: Sequence, action: Callable[..., Any], *args: Any) -> Any:
        """Return what `action` returns, or None if it raised: then `bury` will end the request of `sequence`."""
        try:
            return action(*args)
        except Exception as error:
            self.in_doubt = self.in_doubt or not isinstance(error, OWN)
            self.mark(sequence, error)
            return None

    def guard_own(self, sequence: Sequence, action: Callable[..., Any], *args: Any) -> Any:
        """`guard` an action that changes nothing but what is the sequence's own."""
        try:
            return action(*args)
        except Exception as error:
            self.mark(sequence, error)
            return None

    def mark(self, sequence: Sequence, error: Exception) -> None:
        """Note that work for `sequence` failed, which changed nothing that others share."""
        if isinstance(error, IntegrityError):
            raise error
        self._broken.append((sequence, error))

    def is_marked(self, sequence: Sequence) -> bool:
        """Whether work for the request of `sequence` failed in this step: no part of it may end well any more."""
        return any(broken.request is sequence.request for broken, _ in self._broken)

    def bury(self) -> None:
        """End the marked requests with ERROR. Only where no arrays of a step that hold their rows are in use.

        Raises `IntegrityError` where what one holds cannot be taken back.
        """
        while self._broken:
            sequence, error = self._broken.pop()
            try:
                self._end(sequence.request.request_id, error)
            except Exception as failure:
                raise IntegrityError(f"a request that failed cannot be ended ({type(failure).__name__})") from failure

    def _end(self, request_id: str, error: Exception) -> None:
        about = {"squadron": {"request_id": request_id}}  # fields of the line, where lines have any
        if isinstance(error, InvalidRequestError):
            logger.info("request %s cannot go on: %s", request_id, error.code, extra=about)
            self._roster.finish_request(request_id, FinishReason.ERROR, str(error), error.code)
        elif isinstance(error, StepMemoryError):
            logger.error("request %s is shed: %s", request_id, error, extra=about)
            self._roster.finish_request(request_id, FinishReason.ERROR, error.told, error.code)
        else:
            logger.error("request %s failed in the engine", request_id, exc_info=wordless(error), extra=about)
            message = f"the engine failed on this request ({type(error).__name__})"
            code = (
                "internal_error" if isinstance(error, GrammarError) else ""
            )  # it would fail again: not to be retried
            self._roster.finish_request(request_id, FinishReason.ERROR, message, code)
