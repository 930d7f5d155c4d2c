"""Starts requests with structured output once it is compiled: off the event loop and off the engine's thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from cluster.log_lines import about_request
from engine.errors import InvalidRequestError
from engine.flight import FlightRecorder, Wait
from engine.grammar.base import CompiledGrammar, PreparedGrammar
from engine.request import Request
from engine.sampling_params import StructuredOutput
from engine.wordless import wordless

logger = logging.getLogger(__name__)


class Grammars(Protocol):
    """What is needed of `engine.grammar.process.GrammarService`."""

    def submit(self, wanted: StructuredOutput, owner: bytes = b"") -> Future[CompiledGrammar]:
        """Return what will be the grammar, or an `InvalidRequestError`."""
        ...

    def close(self) -> None:
        """End what compiles; what waits fails."""


class GrammarStart:
    """Compiles for the requests of one replica. Used on one event loop.

    ready: called with each request and its grammar; says whether anybody still wants it. refused: called with its id
    and why it cannot run. flight: where it is noted that a request waits for its grammar.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        ready: Callable[[Request, CompiledGrammar], bool],
        refused: Callable[[str, InvalidRequestError], None],
        flight: FlightRecorder,
    ) -> None:
        self._grammars = grammars
        self._ready = ready
        self._refused = refused
        self._flight = flight
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: Request, wanted: StructuredOutput) -> None:
        """Compile what the output of `request` must match; one of the two calls follows, whoever still cares."""
        if self._grammars is None:
            why = InvalidRequestError("structured output is not available here", "structured", "not_supported")
            self._refused(request.request_id, why)
            return
        # Each tenant has its own salt, so that nobody's grammars keep another's waiting for long.
        future = self._grammars.submit(wanted, request.cache_salt)
        if not future.done():
            what = "what its output must match is compiled"
            self._flight.note(request.request_id, Wait.GRAMMAR, what, tenant=request.tenant)
        task = asyncio.get_running_loop().create_task(self._compile(request, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what compiles."""
        if self._grammars is not None:
            await asyncio.to_thread(self._grammars.close)
        await asyncio.gather(*self._tasks)

    async def _compile(self, request: Request, future: Future[CompiledGrammar]) -> None:
        try:
            # Others may wait for the same: if this task is cancelled, that must not be.
            grammar = await asyncio.shield(asyncio.wrap_future(future))
            prepared = await asyncio.to_thread(PreparedGrammar, grammar, request)
        except InvalidRequestError as error:
            self._refuse(request, error)
        except Exception as error:
            # One request's grammar must not end the others'.
            request_id, cause = request.request_id, wordless(error)
            extra = about_request(request_id)
            logger.error("request %s: its grammar could not be made", request_id, exc_info=cause, extra=extra)
            why = InvalidRequestError("the grammar could not be made ready", "structured", "internal_error")
            self._refuse(request, why)
        else:
            self._waits_no_more(request, Wait.QUEUE, "its grammar is ready")
            if not self._ready(request, prepared):
                self._waits_no_more(request, Wait.ENDED, "nobody wants it any more")

    def _refuse(self, request: Request, error: InvalidRequestError) -> None:
        self._waits_no_more(request, Wait.ENDED, error.code)
        self._refused(request.request_id, error)

    def _waits_no_more(self, request: Request, what: Wait, detail: str) -> None:
        """Note what came after the wait for its grammar, where it had to wait for that."""
        story = self._flight.story(request.request_id)
        if any(event.what is Wait.GRAMMAR for event in story):
            self._flight.note(request.request_id, what, detail)
