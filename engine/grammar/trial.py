"""Walks through a grammar before anybody is served with it: what it costs, and whether it is at odds with itself."""

from __future__ import annotations

import time
from random import Random

import numpy as np

from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar, GrammarState
from engine.grammar.budget import GrammarBudget
from engine.grammar.xgr import Vocabulary
from engine.report import Ints

STRETCH = 100  # tokens of a walk after which it is seen whether they have become dearer
STRETCHES = 6
DEARER = 1.5  # times as dear as the first stretch is one that another one follows


def try_out(vocabulary: Vocabulary, grammar: CompiledGrammar) -> None:
    """Walk through `grammar` as requests will: once at random, once with the same token again where it may come.

    A walk goes on while tokens become dearer, as those of ambiguous grammars do. The same grammar fares alike each
    time, but for the machine's speed.

    Raises `InvalidRequestError` where nothing matches, where a request would run out of what a grammar may cost, and,
    with the code `internal_error`, where a token is allowed and then not taken.
    """
    bits: Ints = np.zeros(vocabulary.num_words, np.int32)
    grammar.state().fill(bits)
    if not bits.any():
        raise InvalidRequestError("no text matches this", "structured")
    for repeats in (False, True):
        _Walk(vocabulary, grammar, repeats).run()


class _Walk:
    def __init__(self, vocabulary: Vocabulary, grammar: CompiledGrammar, repeats: bool) -> None:
        self._grammar = grammar
        self._repeats = repeats
        self._ends = list(vocabulary.ends)
        self._size = vocabulary.size
        self._bits: Ints = np.zeros(vocabulary.num_words, np.int32)
        self._rng = Random(0)
        self._budget = GrammarBudget()
        self._last = -1

    def run(self) -> None:
        """Walk until tokens become no dearer."""
        state, first = self._grammar.state(self._budget), 0.0
        for number in range(STRETCHES):
            begun = time.thread_time()
            for _ in range(STRETCH):
                state = self._stepped(state)
            took = time.thread_time() - begun
            first = first or took
            if number and took < DEARER * first:
                return

    def _stepped(self, state: GrammarState) -> GrammarState:
        """Return the state one token on; a new one where the text is at its end, or no token of this model fits."""
        state.fill(self._bits)
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._size]
        allowed[self._ends] = 0
        tokens = allowed.nonzero()[0]
        if not tokens.size:
            return self._grammar.state(self._budget)
        if not (self._repeats and self._last >= 0 and allowed[self._last]):
            self._last = int(tokens[self._rng.randrange(tokens.size)])
        if not state.accept(self._last):
            raise InvalidRequestError("the grammar compiler failed on this", "structured", "internal_error")
        return state
