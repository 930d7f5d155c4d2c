"""Compiling that can be waited for, is tried out in a process of its own first, and whose results are kept."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection

from typing_extensions import override

from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar, GrammarCompiler
from engine.grammar.helper import READY, Answer, receive, send, serve
from engine.grammar.refused import Refused
from engine.grammar.turns import Turns
from engine.grammar.xgr import Vocabulary, XgrGrammar
from engine.sampling_params import StructuredOutput
from parallel.launcher import Gang, launch

START_TIME = 120.0  # seconds that the helper may take to load its libraries on a machine that is busy
_ATTEMPTS = 2  # a helper may be killed for no fault of the grammar
_DEATH_TIME = 5.0  # seconds until a process whose link is closed has ended
_OWN_DEATHS = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)  # of a grammar, whoever tries it again


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """deadline: seconds for one grammar. room: bytes of memory for one. kept: bytes of grammars that are kept.

    waiting: how many of one owner may wait for their turn.
    """

    deadline: float = 10.0
    room: int = 4 << 30
    kept: int = 256 << 20
    waiting: int = 64


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
                if self._died_of_it():
                    break
                continue
            if kind == "text":
                return words
            raise InvalidRequestError(words, "structured", code)
        raise InvalidRequestError(
            f"compiling this {wanted.kind} ended its process by its time or memory; make it simpler", "structured"
        )

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

    def _died_of_it(self) -> bool:
        """End a helper that does not answer; return whether the grammar ended it, by its time or its memory."""
        gang = self._gang
        if gang is not None:
            gang.join(_DEATH_TIME)
        died = gang is not None and gang.exit_codes[0] in _OWN_DEATHS
        self.kill()
        return died

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
    """Compiles for all requests of one model, in one thread: owners take turns, equal wishes are served at once.

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
        self._turns: Turns[StructuredOutput] = Turns(self._limits.waiting)
        self._refused = Refused()
        self._spent: dict[str, float] = {}  # owner -> seconds
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

    def submit(self, wanted: StructuredOutput, owner: str = "") -> Future[CompiledGrammar]:
        """Return what will be the grammar, or the `InvalidRequestError` that `compile` raises.

        owner: who asks, and is charged for the time; whoever has used least is next. Equal wishes share one result:
        do not cancel it.
        """
        with self._changed:
            found = self._known(wanted, owner)
            if found is not None:
                return found
            future: Future[CompiledGrammar] = Future()
            if self._closed:
                future.set_exception(InvalidRequestError("the server stops", "structured", "shutting_down"))
            elif not self._turns.add(owner, wanted):
                why = f"{self._limits.waiting} of your grammars wait to be compiled; try again later"
                future.set_exception(InvalidRequestError(why, "structured", "rate_limit_exceeded"))
            else:
                self._begin(wanted, future)
            return future

    def spent(self) -> dict[str, float]:
        """Return the seconds that were spent on each owner's grammars so far, those that were refused included."""
        with self._changed:
            return dict(self._spent)

    def close(self) -> None:
        """End the helper and refuse what waits. Can be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._helper is not None:
            self._helper.close()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, wanted: StructuredOutput, future: Future[CompiledGrammar]) -> None:
        self._jobs[wanted] = future
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _known(self, wanted: StructuredOutput, owner: str) -> Future[CompiledGrammar] | None:
        """Return what is known of a wish, or asked for by somebody: then it comes with the turn that is first."""
        if wanted in self._jobs:
            self._turns.add(owner, wanted)
            return self._jobs[wanted]
        future: Future[CompiledGrammar] = Future()
        error = self._refused.find(wanted)
        if wanted in self._kept:
            self._kept.move_to_end(wanted)
            future.set_result(self._kept[wanted])
        elif error is not None:
            future.set_exception(error)
        else:
            return None
        return future

    def _run(self) -> None:
        try:
            while (turn := self._next()) is not None:
                owner, wanted = turn
                self._finish(wanted, self._made, owner)
        finally:
            if self._helper is not None:
                self._helper.kill()
            for wanted in list(self._jobs):
                self._finish(wanted, _stopped, "")

    def _next(self) -> tuple[str, StructuredOutput] | None:
        """Wait for the next wish that no other turn has brought, and return whose it is and what; None at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or self._turns)
                if self._closed:
                    return None
                owner, wanted = self._turns.take()
                if wanted in self._jobs:
                    return owner, wanted

    def _finish(self, wanted: StructuredOutput, make: Callable[[StructuredOutput], XgrGrammar], owner: str) -> None:
        """Make a grammar and charge `owner` for it, before anybody hears of it."""
        begun = time.monotonic()
        try:
            grammar = make(wanted)
        except BaseException as error:
            with self._changed:
                self._charge(owner, time.monotonic() - begun)
                future = self._jobs.pop(wanted)
                self._refused.add(wanted, error)
            future.set_exception(error)
            return
        with self._changed:
            self._charge(owner, time.monotonic() - begun)
            future = self._jobs.pop(wanted)
            self._keep(wanted, grammar)
        future.set_result(grammar)

    def _charge(self, owner: str, seconds: float) -> None:
        self._turns.charge(owner, seconds)
        self._spent[owner] = self._spent.get(owner, 0.0) + seconds

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
    raise InvalidRequestError("the server stops", "structured", "shutting_down")
