"""What was refused is not tried out again for a while: a client that sends it over and over costs nothing."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from engine.errors import InvalidRequestError
from engine.sampling_params import StructuredOutput

KEPT_FOR = 300.0  # seconds: a machine that is busy may refuse for its time what it can do later
MOST = 1024
PASSING = ("internal_error", "shutting_down", "rate_limit_exceeded")  # codes that say nothing of what was wanted


class Refused:
    """Why wanted outputs were refused, the latest of them; by digest, so of little memory. From one thread at a time.

    clock: seconds, never backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[bytes, tuple[float, str, str]] = OrderedDict()

    def add(self, wanted: StructuredOutput, error: BaseException) -> None:
        """Remember an error, unless it is of another kind than a refusal of what was wanted."""
        if not isinstance(error, InvalidRequestError) or error.code in PASSING:
            return
        self._kept[_digest(wanted)] = self._clock() + KEPT_FOR, str(error), error.code
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)

    def find(self, wanted: StructuredOutput) -> InvalidRequestError | None:
        """Return the error once more, None where there was none lately."""
        key = _digest(wanted)
        if key not in self._kept:
            return None
        until, message, code = self._kept[key]
        if self._clock() > until:
            del self._kept[key]
            return None
        return InvalidRequestError(message, "structured", code)


def _digest(wanted: StructuredOutput) -> bytes:
    return hashlib.sha256(f"{wanted.kind} {wanted.text}".encode("utf-8", "surrogatepass")).digest()
