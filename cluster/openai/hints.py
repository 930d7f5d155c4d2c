"""Fields that clients send as hints: taken where nothing here has a use for them, and named in the answer's header.

A hint is what cannot change the tokens of an answer. What can is honoured, or refused.
"""

from __future__ import annotations

import re

from engine.errors import InvalidRequestError

HEADER = "x-squadron-ignored"
_PLACE = re.compile(r"\[\d+\]")


class Hints:
    """Those of one request that had no use. strict: they are refused (`--strict-fields`)."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Each once, in the order in which they were found; never a name that a client made up."""
        return tuple(self._names)

    def ignore(self, name: str) -> None:
        """Note a field. Its places in lists are not told apart: a conversation may hold thousands of them."""
        self._names[_PLACE.sub("[]", name)] = None

    def leave(self, refusal: InvalidRequestError) -> None:
        """Note the field that `refusal` names, or raise it."""
        if self.strict or refusal.param is None:
            raise refusal
        self.ignore(refusal.param)
