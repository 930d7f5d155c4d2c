"""Starts requests with structured output once it is compiled: off the event loop and off the engine's thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from cluster.accounts.flight_recorder import FlightRecorder, Wait
from cluster.telemetry.logs import about_request
from engine.errors import InvalidRequestError, redacted
from engine.grammar.base import CompiledGrammar
from engine.inputs.grammar_masks import PreparedGrammar
from engine.request import Request
from engine.sampling_params import StructuredOutput

logger = logging.getLogger(__name__)


class Grammars(Protocol):
    """What is needed of `engine.grammar.compile_service.GrammarService`."""

    def submit(self, wanted: StructuredOutput, owner: str = "") -> Future[CompiledGrammar]:
        """Return what will be the grammar, or an `InvalidRequestError`."""
        ...

    def spent(self) -> dict[str, float]:
        """Return the seconds that were spent on each owner's grammars so far."""
        ...

    def close(self) -> None:
        """End what compiles; what waits fails."""


class GrammarStart:
    """Compiles for the requests of one replica. Used on one event loop.

    ready: called with each request, if it is wanted still, and its grammar. refused: called with its id and why it
    cannot run. flight: where it is noted that a request waits for its grammar.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        ready: Callable[[Request, CompiledGrammar], None],
        refused: Callable[[str, InvalidRequestError], None],
        flight: FlightRecorder,
    ) -> None:
        self._grammars = grammars
        self._ready = ready
        self._refused = refused
        self._flight = flight
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request

    def spent(self) -> dict[str, float]:
        """Return the seconds that the compiler spent on each tenant's grammars so far."""
        return {} if self._grammars is None else self._grammars.spent()

    def begin(self, request: Request, wanted: StructuredOutput) -> None:
        """Compile what the output of `request` must match; one of the two calls follows, unless it is given up."""
        if self._grammars is None:
            why = InvalidRequestError("structured output is not available here", "structured", "not_supported")
            self._refused(request.request_id, why)
            return
        # By tenant, which a client cannot choose as it does its salt: no tenant's grammars delay another's for long.
        future = self._grammars.submit(wanted, request.tenant)
        if not future.done():
            what = "what its output must match is compiled"
            self._flight.note(request.request_id, Wait.GRAMMAR, what, tenant=request.tenant)
        request_id = request.request_id
        self._tasks[request_id] = task = asyncio.get_running_loop().create_task(self._compile(request, future))
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    def give_up(self, request_id: str) -> bool:
        """Forget a request that was aborted. Returns False if it does not wait here.

        Its grammar is compiled nonetheless, for others may want the same.
        """
        task = self._tasks.pop(request_id, None)
        if task is None or not task.cancel():
            return False
        self._waits_no_more(request_id, Wait.ENDED, "nobody wants it any more")
        return True

    async def close(self) -> None:
        """End what compiles."""
        if self._grammars is not None:
            await asyncio.to_thread(self._grammars.close)
        await asyncio.gather(*self._tasks.values())

    async def _compile(self, request: Request, future: Future[CompiledGrammar]) -> None:
        try:
            grammar = await _result(future)
            prepared = await asyncio.to_thread(PreparedGrammar, grammar, request)
            self._waits_no_more(request.request_id, Wait.QUEUE, "its grammar is ready")
            self._ready(request, prepared)
        except InvalidRequestError as error:
            self._refuse(request, error)
        except Exception as error:
            # One request's grammar must not end the others'.
            request_id, cause = request.request_id, redacted(error)
            extra = about_request(request_id)
            logger.error("request %s: its grammar could not be made or used", request_id, exc_info=cause, extra=extra)
            why = InvalidRequestError("the grammar could not be made ready", "structured", "internal_error")
            self._refuse(request, why)

    def _refuse(self, request: Request, error: InvalidRequestError) -> None:
        self._waits_no_more(request.request_id, Wait.ENDED, error.code)
        self._refused(request.request_id, error)

    def _waits_no_more(self, request_id: str, what: Wait, detail: str) -> None:
        """Note what came after the wait for its grammar, where it had to wait for that."""
        story = self._flight.story(request_id)
        if any(event.what is Wait.GRAMMAR for event in story):
            self._flight.note(request_id, what, detail)


async def _result(future: Future[CompiledGrammar]) -> CompiledGrammar:
    """Wait for a grammar that others may wait for too: if this is cancelled, that must not be."""
    waited = asyncio.wrap_future(future)
    waited.add_done_callback(asyncio.Future.exception)  # else asyncio warns of an exception that was never retrieved
    return await asyncio.shield(waited)
