"""Compiles grammars for all requests of one model: owners take turns, and results are kept.

Each grammar is tried out in a process of its own first. What was refused is not tried out again for a while: a client
that sends it over and over costs nothing.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from typing_extensions import override

from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar, GrammarCompiler
from engine.grammar.helper import CompileLimits, HelperProcess
from engine.grammar.xgrammar_backend import Vocabulary, XgrGrammar
from engine.sampling_params import StructuredOutput

T = TypeVar("T")

REFUSED_SECONDS = 300.0  # that a refusal is kept: a busy machine may refuse for its time what it can do later
MAX_REFUSED = 1024
PASSING = ("internal_error", "shutting_down", "rate_limit_exceeded")  # codes that say nothing of what was wanted


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
        self._queue: OwnerQueue[StructuredOutput] = OwnerQueue(self._limits.waiting)
        self._refused = RefusalCache()
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
            elif not self._queue.add(owner, wanted):
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
            self._queue.add(owner, wanted)
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
                self._changed.wait_for(lambda: self._closed or self._queue)
                if self._closed:
                    return None
                owner, wanted = self._queue.take()
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
        self._queue.charge(owner, seconds)
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


class RefusalCache:
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
        self._kept[_digest(wanted)] = self._clock() + REFUSED_SECONDS, str(error), error.code
        if len(self._kept) > MAX_REFUSED:
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


class OwnerQueue(Generic[T]):
    """Jobs by owner, each of whom is charged for the time of theirs. Not for several threads at once.

    An owner who comes anew, or again after a pause, stands with those who have used least: what was not used is not
    saved up, and what was used by others before is not owed. So a job waits for one of each other owner at most, or
    for as many short ones as take as long.

    most: jobs of one owner that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[str, deque[T]] = {}
        self._used: dict[str, float] = {}  # seconds, of owners who are ahead of the least
        self._least = 0.0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, owner: str, job: T) -> bool:
        """Queue a job, unless this owner waits for it already; False if too many of theirs wait."""
        queue = self._queues.get(owner, deque())
        if job in queue:
            return True
        if len(queue) >= self._most:
            return False
        queue.append(job)
        self._queues[owner] = queue
        self._used[owner] = max(self._used.get(owner, 0.0), self._least)
        return True

    def take(self) -> tuple[str, T]:
        """Return the next job and whose it is. Raises `ValueError` if none waits."""
        owner = min(self._queues, key=lambda each: self._used[each])
        self._least = self._used[owner]
        queue = self._queues[owner]
        job = queue.popleft()
        if not queue:
            del self._queues[owner]
        return owner, job

    def charge(self, owner: str, seconds: float) -> None:
        """Note what a job of `owner` took."""
        self._used[owner] = self._used.get(owner, self._least) + seconds
        self._used = {one: used for one, used in self._used.items() if one in self._queues or used > self._least}
