"""Compiling that can be waited for, is tried out in a process of its own first, and whose results are kept."""

from __future__ import annotations

import multiprocessing
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection

from typing_extensions import override

from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar, GrammarCompiler
from engine.grammar.helper import READY, Answer, receive, send, serve
from engine.grammar.xgr import Vocabulary, XgrGrammar
from engine.sampling_params import StructuredOutput
from parallel.launcher import Gang, launch

START_TIME = 120.0  # seconds that the helper may take to load its libraries on a machine that is busy
_ATTEMPTS = 2  # a helper may be killed for no fault of the grammar


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """deadline: seconds for one grammar. room: bytes of memory for one. kept: bytes of grammars that are kept.

    waiting: how many may wait for their turn.
    """

    deadline: float = 10.0
    room: int = 4 << 30
    kept: int = 256 << 20
    waiting: int = 256


class HelperProcess:
    """Owns one helper, started when it is needed and again after its end. Used by one thread; closed by any."""

    def __init__(self, tokens: Sequence[bytes], ends: Sequence[int], limits: CompileLimits) -> None:
        self._args = tuple(tokens), tuple(ends), limits.deadline, limits.room
        self._deadline = limits.deadline
        self._gang: Gang | None = None
        self._link: Connection | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the helper that runs, None if there is none."""
        gang = self._gang
        return gang.pids[0] if gang is not None else None

    def text(self, wanted: StructuredOutput) -> str:
        """Return the grammar of what is wanted, found harmless. Raises `InvalidRequestError`."""
        for _ in range(_ATTEMPTS):
            try:
                kind, words, code = self._ask(wanted)
            except (EOFError, OSError):
                self.kill()
                continue
            if kind == "text":
                return words
            raise InvalidRequestError(words, "structured", code)
        raise InvalidRequestError(f"compiling this {wanted.kind} ended its process; make it simpler", "structured")

    def kill(self) -> None:
        """End the helper, whatever it does. Can be called twice."""
        gang, link, self._gang, self._link = self._gang, self._link, None, None
        if gang is not None:
            gang.kill()
        if link is not None:
            link.close()

    def close(self) -> None:
        """End the helper and start no other."""
        self._closed = True
        gang = self._gang
        if gang is not None:
            gang.kill()

    def _ask(self, wanted: StructuredOutput) -> Answer:
        link = self._link or self._start()
        send(link, wanted.kind, wanted.text)
        if not link.poll(self._deadline):
            self.kill()
            raise InvalidRequestError(
                f"this {wanted.kind} was not compiled within {self._deadline:g} s; make it simpler", "structured"
            )
        return _answer(link)

    def _start(self) -> Connection:
        mine, theirs = multiprocessing.get_context("spawn").Pipe()
        with theirs:
            self._gang = launch(2, serve, (theirs, *self._args))
        self._link = mine
        if self._closed or not mine.poll(START_TIME):
            self.kill()
            raise InvalidRequestError("the grammar compiler did not start", "structured", "internal_error")
        first = _answer(mine)
        if first != READY:
            self.kill()
            raise InvalidRequestError(first[1], "structured", first[2])
        return mine


def _answer(link: Connection) -> Answer:
    kind, words, code = receive(link)
    return kind, words, code


class GrammarService(GrammarCompiler):
    """Compiles for all requests of one model, in one thread: callers take turns, equal ones are served at once.

    Each grammar is tried out in the helper first: one that takes for ever, or all memory, ends the helper and
    is refused; then it is compiled here, which is known to be short. (The compiled form could be handed over instead,
    but its size grows with the square of the number of rules.)
    """

    def __init__(
        self,
        vocabulary: Callable[[], Sequence[bytes]],
        eos_token_ids: Sequence[int],
        limits: CompileLimits | None = None,
    ) -> None:
        """vocabulary: returns what each token id adds to a text; called once, when the first grammar is wanted."""
        self._limits = limits or CompileLimits()
        self._tokens = vocabulary
        self._ends = tuple(eos_token_ids)
        self._kept: OrderedDict[StructuredOutput, XgrGrammar] = OrderedDict()
        self._jobs: dict[StructuredOutput, Future[CompiledGrammar]] = {}
        self._turns: OrderedDict[bytes, deque[StructuredOutput]] = OrderedDict()  # by owner, the next one first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._helper: HelperProcess | None = None
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the grammars that are kept."""
        with self._changed:
            return sum(_size(wanted, grammar) for wanted, grammar in self._kept.items())

    @property
    def helper_pid(self) -> int | None:
        """Process id of the helper that runs, None if there is none."""
        return None if self._helper is None else self._helper.pid

    @override
    def compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        return self.submit(wanted).result()

    def submit(self, wanted: StructuredOutput, owner: bytes = b"") -> Future[CompiledGrammar]:
        """Return what will be the grammar, or the `InvalidRequestError` that `compile` raises.

        owner: who asks; each owner has one turn, then the next. Equal wishes share one result: do not cancel it.
        """
        with self._changed:
            found = self._known(wanted)
            if found is not None:
                return found
            future: Future[CompiledGrammar] = Future()
            if self._closed or len(self._jobs) >= self._limits.waiting:
                why = "the server stops" if self._closed else "too many grammars wait to be compiled; try again later"
                future.set_exception(InvalidRequestError(why, "structured", "busy"))
                return future
            self._jobs[wanted] = future
            self._turns.setdefault(owner, deque()).append(wanted)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
            self._changed.notify()
            return future

    def close(self) -> None:
        """End the helper and refuse what waits. Can be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._helper is not None:
            self._helper.close()
        if self._thread is not None:
            self._thread.join()

    def _known(self, wanted: StructuredOutput) -> Future[CompiledGrammar] | None:
        if wanted in self._kept:
            self._kept.move_to_end(wanted)
            future: Future[CompiledGrammar] = Future()
            future.set_result(self._kept[wanted])
            return future
        return self._jobs.get(wanted)

    def _run(self) -> None:
        try:
            while (wanted := self._next()) is not None:
                self._finish(wanted, self._made)
        finally:
            if self._helper is not None:
                self._helper.kill()
            for wanted in list(self._jobs):
                self._finish(wanted, _stopped)

    def _next(self) -> StructuredOutput | None:
        """Wait for the next wish; None when this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._turns)
            if self._closed:
                return None
            owner, queue = self._turns.popitem(last=False)
            wanted = queue.popleft()
            if queue:
                self._turns[owner] = queue
            return wanted

    def _finish(self, wanted: StructuredOutput, make: Callable[[StructuredOutput], XgrGrammar]) -> None:
        try:
            grammar = make(wanted)
        except BaseException as error:
            with self._changed:
                future = self._jobs.pop(wanted)
            future.set_exception(error)
            return
        with self._changed:
            future = self._jobs.pop(wanted)
            self._keep(wanted, grammar)
        future.set_result(grammar)

    def _made(self, wanted: StructuredOutput) -> XgrGrammar:
        if self._helper is None:
            tokens = self._tokens()
            self._vocabulary = Vocabulary(tokens, self._ends)
            self._helper = HelperProcess(tokens, self._ends, self._limits)
        return self._vocabulary.compile(self._helper.text(wanted))

    def _keep(self, wanted: StructuredOutput, grammar: XgrGrammar) -> None:
        self._kept[wanted] = grammar
        total = sum(_size(each, kept) for each, kept in self._kept.items())
        while total > self._limits.kept and len(self._kept) > 1:
            total -= _size(*self._kept.popitem(last=False))


def _size(wanted: StructuredOutput, grammar: XgrGrammar) -> int:
    return grammar.num_bytes + len(wanted.text) + 10_000  # of Python's and xgrammar's own, about


def _stopped(_: StructuredOutput) -> XgrGrammar:
    raise InvalidRequestError("the server stops", "structured", "busy")
