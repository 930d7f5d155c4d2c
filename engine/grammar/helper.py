"""The process that tries grammars out: whatever a grammar does to it, it can be killed, and another one started."""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

from engine.errors import InvalidRequestError
from engine.grammar.texts import grammar_text
from engine.grammar.xgrammar_backend import Vocabulary, try_out
from engine.sampling_params import GrammarKind, StructuredOutput
from parallel.launcher import LocalWorkerGroup, launch

START_TIME = 120.0  # seconds that the helper may take to load its libraries on a machine that is busy
_ATTEMPTS = 2  # a helper may be killed for no fault of the grammar
_DEATH_TIME = 5.0  # seconds until a process whose link is closed has ended
_OWN_DEATHS = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)  # of a grammar, whoever tries it again
READY = ("ready", "", "")
Answer = tuple[str, str, str]  # "ready"; "text" and the grammar; or "refused", why, and the code of the error


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
        self._workers: LocalWorkerGroup | None = None
        self._link: Connection | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the helper that runs, None if there is none."""
        workers = self._workers
        return workers.pids[0] if workers is not None else None

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
        workers, link, self._workers, self._link = self._workers, self._link, None, None
        if workers is not None:
            workers.kill()
        if link is not None:
            link.close()

    def close(self) -> None:
        """End the helper and start no other."""
        self._closed = True
        workers = self._workers
        if workers is not None:
            workers.kill()

    def _died_of_it(self) -> bool:
        """End a helper that does not answer; return whether the grammar ended it, by its time or its memory."""
        workers = self._workers
        if workers is not None:
            workers.join(_DEATH_TIME)
        died = workers is not None and workers.exit_codes[0] in _OWN_DEATHS
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
        return _received(link)

    def _start(self) -> Connection:
        mine, theirs = multiprocessing.get_context("spawn").Pipe()
        with theirs:
            self._workers = launch(2, serve, (theirs, *self._args))
        self._link = mine
        if self._closed or not mine.poll(START_TIME):
            self.kill()
            raise InvalidRequestError("the grammar compiler did not start", "structured", "internal_error")
        first = _received(mine)
        if first != READY:
            self.kill()
            raise InvalidRequestError(first[1], "structured", first[2])
        return mine


def _received(link: Connection) -> Answer:
    kind, words, code = receive(link)
    return kind, words, code


def serve(
    _rank: int, link: Connection, tokens: Sequence[bytes], ends: Sequence[int], seconds: float, room: int
) -> None:
    """Answer each wanted output with its grammar once it was found harmless, until the other end is closed.

    seconds: CPU time for each. room: bytes that may be allocated beside what is there at the start.
    """
    try:
        vocabulary = Vocabulary(tokens, ends)
    except InvalidRequestError as error:
        send(link, "refused", str(error), error.code)
        return
    _limit_memory(room)
    send(link, *READY)
    while True:
        try:
            kind, text = receive(link)
        except EOFError:
            return
        _limit_time(seconds)
        send(link, *_answer(vocabulary, StructuredOutput(cast(GrammarKind, kind), text)))


def send(link: Connection, *words: str) -> None:
    """Send one message of texts. Never an object: what tries out a stranger's grammar is not to be believed."""
    link.send_bytes(json.dumps(words).encode("ascii"))


def receive(link: Connection) -> list[str]:
    """Return the next message. Raises `EOFError` once the other end is closed."""
    words: list[str] = json.loads(link.recv_bytes())
    return words


def _answer(vocabulary: Vocabulary, wanted: StructuredOutput) -> Answer:
    try:
        text = grammar_text(wanted)
        try_out(vocabulary, vocabulary.compile(text))
    except InvalidRequestError as error:
        return "refused", str(error), error.code
    except (MemoryError, RecursionError):
        return "refused", f"this {wanted.kind} takes too much memory; make it simpler", "invalid_value"
    return "text", text, ""


def _limit_memory(room: int) -> None:
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, mapped + room))


def _limit_time(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, hard))
