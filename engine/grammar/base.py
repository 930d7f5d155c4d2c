"""What the engine knows of grammars: which tokens may come next, what came, and what that may cost one request."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable

from engine.errors import GrammarError, InvalidRequestError
from engine.request import GrammarState
from engine.sampling_params import StructuredOutput

BASE_TIME = 1.0  # seconds of CPU beyond what its tokens bring
# Seconds more for each token: what a mask over 128,000 tokens takes where none is known beforehand.
TOKEN_TIME = 0.002


class GrammarBudget:
    """Seconds of CPU that one request's grammar may use now: each token brings some, up to the base. From any thread.

    What one of its choices uses is taken from all, and so is what it takes to rebuild their states where a request
    goes on that ran elsewhere: an ambiguous grammar, whose every token is dearer than the one before, comes no
    further on a second replica than on the first.
    """

    def __init__(self, base: float = BASE_TIME, each: float = TOKEN_TIME) -> None:
        self._most = self._left = base
        self._each = each
        self._lock = threading.Lock()

    def charge(self, seconds: float, tokens: int = 0) -> None:
        """Take what was used for a mask, or for as many tokens."""
        with self._lock:
            self._left = min(self._most, self._left + tokens * self._each - seconds)

    def check(self) -> None:
        """Raise `InvalidRequestError` once more was used than may be."""
        if self._left < 0:
            raise InvalidRequestError(
                "what the output must match takes too long to check: it is too large, or a text can be read in too "
                "many ways; make it smaller, and write it so that each text can be made in one way only",
                "structured",
                "grammar_too_slow",
            )


class CompiledGrammar(ABC):
    """A grammar made ready for one vocabulary; shared by any number of choices."""

    @abstractmethod
    def state(self, budget: GrammarBudget | None = None) -> GrammarState:
        """Return the state before the first token. budget: of its request; None = one of its own."""

    def resume(self, token_ids: Iterable[int], budget: GrammarBudget | None = None) -> GrammarState:
        """Return the state after `token_ids`, which `budget` pays for.

        Raises `GrammarError` if they do not match, `InvalidRequestError` if they cost too much.
        """
        state = self.state(budget)
        for number, token_id in enumerate(token_ids):
            if not state.accept(token_id):
                raise GrammarError(f"token {token_id}, the {number + 1}. of the output, does not match the grammar")
        return state


class GrammarCompiler(ABC):
    """Makes grammars ready for the vocabulary of one model."""

    @abstractmethod
    def compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        """Return the compiled grammar; may take seconds.

        Raises `InvalidRequestError` naming what cannot be read, or is not supported.
        """
