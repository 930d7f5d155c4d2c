"""The process that tries grammars out: whatever a grammar does to it, it can be killed."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import cast

from engine.errors import InvalidRequestError
from engine.grammar.texts import grammar_text
from engine.grammar.trial import try_out
from engine.grammar.xgr import Vocabulary
from engine.sampling_params import GrammarKind, StructuredOutput

READY = ("ready", "", "")
Answer = tuple[str, str, str]  # "ready"; "text" and the grammar; or "refused", why, and the code of the error


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
