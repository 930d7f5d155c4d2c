"""The process that tries grammars out: whatever a grammar does to it, it can be killed."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from engine.errors import InvalidRequestError
from engine.grammar.texts import grammar_text
from engine.grammar.xgr import Vocabulary
from engine.sampling_params import StructuredOutput

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
        link.send(("refused", str(error), error.code))
        return
    _limit_memory(room)
    link.send(READY)
    while True:
        try:
            wanted: StructuredOutput = link.recv()
        except EOFError:
            return
        _limit_time(seconds)
        link.send(_answer(vocabulary, wanted))


def _answer(vocabulary: Vocabulary, wanted: StructuredOutput) -> Answer:
    try:
        text = grammar_text(wanted)
        bits = np.zeros(vocabulary.num_words, np.int32)
        vocabulary.compile(text).state().fill(bits)
        if not bits.any():
            raise InvalidRequestError(f"nothing matches this {wanted.kind}", "structured")
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
