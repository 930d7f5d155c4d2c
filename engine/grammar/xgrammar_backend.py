"""Grammars compiled by xgrammar, which is loaded when the first one is wanted: it is an extra.

Before anybody is served with a grammar, it is walked through: what it costs, and whether it is at odds with itself.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar, GrammarBudget
from engine.grammar.gbnf import inner_ascii, truthful
from engine.report import Ints
from engine.request import GrammarState

STRETCH = 100  # tokens of a walk after which it is seen whether they have become dearer
STRETCHES = 6
DEARER = 1.5  # times as dear as the first stretch is one that another one follows


class Vocabulary:
    """The tokens of one model, made ready for xgrammar. Raises `InvalidRequestError` when that is not installed."""

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        """tokens: what each id adds to a text, as many as logits are wide; tokens that are empty are never drawn."""
        if not eos_token_ids:
            raise InvalidRequestError(
                "structured output needs a model with an end-of-sequence token", "structured", "not_supported"
            )
        try:
            self.library: Any = importlib.import_module("xgrammar")
        except ModuleNotFoundError as error:
            raise InvalidRequestError(
                "structured output needs xgrammar: pip install -e '.[structured]' in Squadron's folder",
                "structured",
                "not_supported",
            ) from error
        self.size = len(tokens)
        self.num_words = -(-len(tokens) // 32)  # of a mask
        self.ends = frozenset(eos_token_ids)
        shown = [b"" if token in self.ends else text for token, text in enumerate(tokens)]
        self._inner = inner_ascii(shown)
        kind = self.library.VocabType.RAW
        self._info = self.library.TokenizerInfo(
            shown, kind, vocab_size=len(shown), stop_token_ids=sorted(self.ends), add_prefix_space=False
        )

    def compile(self, text: str) -> XgrGrammar:
        """Return the grammar `text` (GBNF) made ready. Raises `InvalidRequestError` when it cannot be read."""
        compiler = self.library.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        try:
            compiled = compiler.compile_grammar(truthful(text, self._inner))
        except RuntimeError as error:  # xgrammar's only kind of error
            raise InvalidRequestError(f"the grammar cannot be used: {_reason(error)}", "structured") from error
        return XgrGrammar(self.library, compiled)


class XgrGrammar(CompiledGrammar):
    """A grammar compiled by xgrammar. num_bytes: what it holds in memory."""

    def __init__(self, library: Any, compiled: Any) -> None:
        self._library = library
        self._compiled = compiled
        self.num_bytes: int = compiled.memory_size_bytes

    @override
    def state(self, budget: GrammarBudget | None = None) -> GrammarState:
        return _State(self._library.GrammarMatcher(self._compiled), budget or GrammarBudget())


class _State(GrammarState):
    def __init__(self, matcher: Any, budget: GrammarBudget) -> None:
        self._matcher = matcher
        self._budget = budget

    @override
    def accept(self, token_id: int) -> bool:
        if self.finished:
            return False
        self._budget.check()
        begun = time.thread_time()
        taken: bool = self._matcher.accept_token(token_id)
        self._budget.charge(time.thread_time() - begun, 1)
        return taken

    @override
    def fill(self, bits: Ints) -> None:
        if self.finished:
            bits[:] = 0
            return
        self._budget.check()
        begun = time.thread_time()
        row = torch.from_numpy(bits.view(np.int32)[None])
        if not self._matcher.fill_next_token_bitmask(row):
            bits[:] = -1
        self._budget.charge(time.thread_time() - begun)

    @property
    @override
    def finished(self) -> bool:
        ended: bool = self._matcher.is_terminated()
        return ended


def _reason(error: RuntimeError) -> str:
    """Return what xgrammar says without the place in its sources: `[time] file:line: reason`."""
    return str(error).rsplit(".cc:", 1)[-1].split(": ", 1)[-1].strip()[:500]


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
