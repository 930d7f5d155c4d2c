"""Starts requests with structured output once it is compiled: off the event loop and off the engine's thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from cluster.log_lines import about_request
from engine.errors import InvalidRequestError
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

    ready: called with each request and its grammar. refused: called with its id and why it cannot run.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        ready: Callable[[Request, CompiledGrammar], None],
        refused: Callable[[str, InvalidRequestError], None],
    ) -> None:
        self._grammars = grammars
        self._ready = ready
        self._refused = refused
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: Request, wanted: StructuredOutput) -> None:
        """Compile what the output of `request` must match; one of the two calls follows, whoever still cares."""
        if self._grammars is None:
            why = InvalidRequestError("structured output is not available here", "structured", "not_supported")
            self._refused(request.request_id, why)
            return
        # Each tenant has its own salt, so that nobody's grammars keep another's waiting for long.
        task = asyncio.get_running_loop().create_task(
            self._compile(request, self._grammars.submit(wanted, request.cache_salt))
        )
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
            self._refused(request.request_id, error)
        except Exception as error:
            # One request's grammar must not end the others'.
            request_id, cause = request.request_id, wordless(error)
            extra = about_request(request_id)
            logger.error("request %s: its grammar could not be made", request_id, exc_info=cause, extra=extra)
            why = InvalidRequestError("the grammar could not be made ready", "structured", "internal_error")
            self._refused(request.request_id, why)
        else:
            self._ready(request, prepared)
