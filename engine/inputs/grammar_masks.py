"""Grammars of running requests: where their choices stand, and masks worked out while the model runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from typing_extensions import override

from engine.device.machine import cores
from engine.errors import GrammarError, InvalidRequestError, redacted
from engine.grammar.base import CompiledGrammar, GrammarBudget
from engine.report import Ints
from engine.request import GrammarState, Request
from engine.request import Sequence as Choice

logger = logging.getLogger(__name__)

MOST_THREADS = 4
ROWS_EACH = 4  # that a thread is worth: each takes some tenths of a millisecond

Masks = tuple[Ints, Ints]  # rows, [num_masked]; their bits, [num_masked, vocab / 32 rounded up]


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


class MaskMaker:
    """Fills masks in a few threads of its own. The arrays of one call are overwritten by the next.

    drawn: waits for the tokens of the step in flight, one for each of its samples, -1 where it has none. threads:
    unless as many as the machine has cores, up to `MOST_THREADS`.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, drawn: Callable[[], Ints], threads: int | None = None
    ) -> None:
        self._bits: Ints = np.zeros((num_slots, -(-vocab_size // 32)), np.int32)
        self._drawn = drawn
        self._threads = threads or min(MOST_THREADS, cores())
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def start(self, rows: Sequence[int], choices: Sequence[Choice], drawn_now: Sequence[int]) -> Callable[[], Masks]:
        """Begin to fill the masks of `choices`, each with a grammar; what is returned waits for them.

        rows: the sample of each. drawn_now: the sample of the step in flight that draws the last token of each, -1
        where it is known; their grammars take that token, and their masks are filled, when they are waited for.
        """
        wait(self._jobs)  # of a call whose masks were not asked for: no grammar is used by two threads
        self._jobs = []
        found = np.array(rows, np.int32)
        bits = self._bits[: len(found)]
        late = [place for place, sample in enumerate(drawn_now) if sample >= 0]
        self._begin([(choices[place], bits[place]) for place, sample in enumerate(drawn_now) if sample < 0])

        def masks() -> Masks:
            if late:
                tokens = self._drawn()
                for place in late:
                    if (token := int(tokens[drawn_now[place]])) >= 0:
                        _match(choices[place], token)
                self._begin([(choices[place], bits[place]) for place in late])
            for job in self._jobs:
                job.result()
            return found, bits

        return masks

    def close(self) -> None:
        """End the threads. Can be called twice."""
        if self._pool is not None:
            self._pool.shutdown()

    def _begin(self, wanted: Sequence[tuple[Choice, Ints]]) -> None:
        """Have the threads fill masks, about as many each."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="grammar-masks")
        share = max(ROWS_EACH, -(-len(wanted) // self._threads))
        parts = [wanted[first : first + share] for first in range(0, len(wanted), share)]
        self._jobs += [self._pool.submit(_fill, part) for part in parts]


def _match(choice: Choice, token_id: int) -> None:
    """Have a grammar take the token that the step in flight drew."""
    try:
        choice.match(token_id, choice.num_output_tokens)
    except Exception:
        logger.debug("a grammar did not take a token; its request ends when the step is taken in")


def _fill(wanted: Iterable[tuple[Choice, Ints]]) -> None:
    for choice, bits in wanted:
        try:
            if choice.grammar is None or choice.mismatch is not None:
                bits[:] = 0
            else:
                choice.grammar.fill(bits)
                if not bits.any() and not choice.grammar.finished:
                    choice.mismatch = GrammarError("the grammar allows no token, and is not at its end")
        except InvalidRequestError as error:
            choice.mismatch = choice.mismatch or error  # with which its request ends: no token is left to it
            bits[:] = 0
        except Exception as error:
            # Its own request ends, for no token is left to it; the others go on.
            logger.error("a grammar could not say what may come next", exc_info=redacted(error))
            choice.mismatch = choice.mismatch or GrammarError("the grammar could not say what may come next")
            bits[:] = 0
