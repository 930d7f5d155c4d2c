"""The tokens of one row: those that an earlier driver wrote down, then new ones, written down as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import Progress
from cluster.batch.ledger.token_file import ChoiceTokens
from cluster.batch.ticks import Ticks
from cluster.generation import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from engine.request import Request

_NOTHING = ChoiceTokens()


class RowTokens:
    """A `TokenSource` for the requests of one row. What runs is read once a tick, however many tokens came.

    Choice `c` of request `r` is choice `r x n + c` of the row in the ledger. kept: whether tokens are written down;
    where not, a row that is broken off begins anew.
    """

    def __init__(
        self, row: int, requests: Sequence[Request], source: TokenSource, ledger: Ledger, ticks: Ticks, kept: bool
    ) -> None:
        self._row = row
        self._first = {one.request_id: i * one.params.n for i, one in enumerate(requests)}
        self._source = source
        self._ledger = ledger
        self._ticks = ticks
        self._kept = kept
        self._ended: set[tuple[str, int]] = set()
        if not kept:
            ledger.forget_tokens(row)

    async def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncGenerator[TokenChunk, None]:
        """See `TokenSource.generate`."""
        known = self._known(request)
        for choice, found in known.items():
            if found.tokens or found.finish:
                yield TokenChunk(choice, tuple(found.tokens), finish_reason=found.finish)
        resumed = self._resumed(request, known)
        if resumed is None:
            return
        places = {choice: len(found.tokens) for choice, found in known.items()}
        async with aclosing(self._paced(resumed, context)) as chunks:
            async for chunk in chunks:
                self._note(request.request_id, chunk, places)
                yield chunk

    def finish_choice(self, request_id: str, choice: int) -> None:
        """See `TokenSource.finish_choice`."""
        self._ended.add((request_id, choice))
        self._source.finish_choice(request_id, choice)

    def _known(self, request: Request) -> Mapping[int, ChoiceTokens]:
        choices = self._ledger.partial.get(self._row, {})
        first = self._first[request.request_id]
        # Copied, for the ledger goes on with the same lists.
        return {
            c: ChoiceTokens(list(found.tokens), found.finish)
            for c in range(request.params.n)
            for found in [choices.get(first + c, _NOTHING)]
        }

    def _resumed(self, request: Request, known: Mapping[int, ChoiceTokens]) -> Request | None:
        """Return the request as it goes on, None when nothing of it is left to run."""
        if not any(found.tokens or found.finish for found in known.values()):
            return request
        name = request.request_id
        still = {c: found for c, found in known.items() if found.finish is None and (name, c) not in self._ended}
        return replace(request, resume={c: tuple(found.tokens) for c, found in still.items()}) if still else None

    async def _paced(self, request: Request, context: CallContext) -> AsyncGenerator[TokenChunk, None]:
        """Read what has come once a tick: a chunk per choice and tick, not one per token."""
        running, since = request.params.n if request.resume is None else len(request.resume), 0
        source = cast("AsyncGenerator[TokenChunk, None]", self._source.generate(request, context))
        async with aclosing(source) as chunks:
            async for chunk in chunks:
                running -= chunk.finish_reason is not None
                since += 1
                yield chunk
                if running and since >= running:
                    since = 0
                    await self._ticks.next()

    def _note(self, name: str, chunk: TokenChunk, places: dict[int, int]) -> None:
        if self._kept and (chunk.token_ids or chunk.finish_reason):
            place, choice = places[chunk.choice], self._first[name] + chunk.choice
            places[chunk.choice] = place + len(chunk.token_ids)
            self._ledger.note_tokens(Progress(self._row, choice, place, chunk.token_ids, chunk.finish_reason))
