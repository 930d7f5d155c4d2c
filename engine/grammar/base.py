"""What the engine knows of grammars: which tokens may come next, and what came."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from typing_extensions import override

from engine.errors import GrammarError, InvalidRequestError
from engine.grammar.budget import GrammarBudget
from engine.report import Ints
from engine.request import Request
from engine.sampling_params import StructuredOutput


class GrammarState(ABC):
    """Where one choice stands in its grammar: a function of the grammar and the tokens taken. Used by one thread."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Take the next token; False, and nothing changes, if the grammar does not allow it.

        Raises `InvalidRequestError` once the budget is used up.
        """

    @abstractmethod
    def fill(self, bits: Ints) -> None:
        """Write the tokens that may come next as bits, the lowest first. bits: [vocab / 32 rounded up].

        Raises `InvalidRequestError` once the budget is used up.
        """

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the output is complete and its end was drawn."""


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


class PreparedGrammar(CompiledGrammar):
    """A compiled grammar with the states of one request worked out beforehand: adding the request then costs nothing.

    Raises `GrammarError` if one of the logs does not match, `InvalidRequestError` if they cost too much.
    """

    def __init__(self, grammar: CompiledGrammar, request: Request) -> None:
        self._grammar = grammar
        self._budget = GrammarBudget()
        self._states: dict[tuple[int, ...], list[GrammarState]] = {}
        for log in _logs(request).values():
            self._states.setdefault(tuple(log), []).append(grammar.resume(log, self._budget))

    @override
    def state(self, budget: GrammarBudget | None = None) -> GrammarState:
        return self.resume((), budget)

    @override
    def resume(self, token_ids: Iterable[int], budget: GrammarBudget | None = None) -> GrammarState:
        """As that of the grammar; `budget` is not asked: all states of the request share one."""
        log = tuple(token_ids)
        ready = self._states.get(log)
        return ready.pop() if ready else self._grammar.resume(log, self._budget)


class GrammarCompiler(ABC):
    """Makes grammars ready for the vocabulary of one model."""

    @abstractmethod
    def compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        """Return the compiled grammar; may take seconds.

        Raises `InvalidRequestError` naming what cannot be read, or is not supported.
        """


def grammar_states(request: Request, grammar: CompiledGrammar | None) -> dict[int, GrammarState]:
    """Return where each choice of `request` stands in its grammar, rebuilt from its token log; they share one budget.

    Raises `InvalidRequestError` when there is a grammar to match and none was compiled.
    """
    if grammar is None:
        if request.params.structured is not None:
            raise InvalidRequestError("structured output is not available here", "structured", "not_supported")
        return {}
    budget = GrammarBudget()
    return {choice: grammar.resume(log, budget) for choice, log in _logs(request).items()}


def _logs(request: Request) -> dict[int, tuple[int, ...]]:
    """Return the output so far of each choice that is to run."""
    return dict.fromkeys(range(request.params.n), ()) if request.resume is None else request.resume
