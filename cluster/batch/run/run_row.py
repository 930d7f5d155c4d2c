"""Runs one prepared row to its one result: the answer as HTTP would give it, or one typed error.

A row's tokens are those that an earlier driver wrote down, then new ones, which a ticker writes down as they come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, cast

from msgspec import json

from cluster.batch.errors import BatchError
from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import OK, NewTokens, RowDone
from cluster.batch.ledger.row_files import ChoiceTokens
from cluster.batch.row_requests import Prepared
from cluster.batch.rows import CHAT, COMPLETIONS
from cluster.errors import ApiError, as_api_error
from cluster.openai.call import Call
from cluster.openai.embeddings import EmbeddingCall, embedded, whole_answer
from cluster.openai.frames import ChatFrames, CompletionFrames
from cluster.openai.generation import Generation, whole_body
from cluster.openai.served_model import ServedModel
from cluster.router.token_log import ChoiceLog, TokenLog
from cluster.telemetry.metrics import ModelMetrics, RequestTrack
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from engine.errors import InvalidRequestError
from engine.loader.fingerprint import but_for_rounding
from engine.report import TokenLogprob
from engine.request import Request

TICK = 0.05  # seconds: what a killed driver may lose, and what a finished row may wait
READ_TICKS = 20  # between two readings of a row whose end its tokens alone show
WATCH_TICKS = 4  # of one whose text may end it: what is drawn after that is drawn in vain
_NOTHING = ChoiceTokens()
logger = logging.getLogger(__name__)
MODEL_CHANGED = "model_changed"
RETRIES = 3  # of errors that say that they may be over by then
RETRY_PAUSE = 0.5  # seconds before the first; twice as long before each later one
_FRAMES = {CHAT: ChatFrames, COMPLETIONS: CompletionFrames}


class Answers:
    """Answers rows of one model. Errors become results, too; raised are a broken ledger and the end of the model."""

    def __init__(self, model: ServedModel, source: RowSource, metrics: ModelMetrics) -> None:
        self._model = model
        self._source = source
        self._metrics = metrics

    async def answer(self, prepared: Prepared) -> RowDone:
        """Return the row's result."""
        row, attempt = prepared.task.row, 0
        while True:
            try:
                return await self._answer(prepared)
            except (ApiError, InvalidRequestError) as error:
                typed = as_api_error(error)
            if typed.code == MODEL_CHANGED:
                raise BatchError(
                    "while the batch ran, the replicas were replaced by such as run another model, or compute it "
                    "otherwise; run it again with --resume, which goes on or says why it cannot"
                )
            if not typed.retryable or attempt == RETRIES:
                return failed(row, typed)
            logger.info("row %d is tried again: %s", row, typed.message)
            await asyncio.sleep(RETRY_PAUSE * 2**attempt)
            attempt += 1

    async def _answer(self, prepared: Prepared) -> RowDone:
        row, call = prepared.task.row, prepared.call
        tokens = RowTokens(row, prepared.requests, self._source, prepared.is_resumable)
        track = self._metrics.track(prepared.requests)
        if isinstance(call, EmbeddingCall):
            vectors = await embedded(call, tokens, track)
            body = await whole_answer(call, vectors, self._model.model_id)
            return RowDone(row, OK, self._signed(body), prepared.num_prompt_tokens)
        try:
            return await self._text(prepared, call, tokens, track)
        except (ApiError, InvalidRequestError) as error:
            raise call.clients_error(error) from error

    async def _text(self, prepared: Prepared, call: Call, tokens: TokenSource, track: RequestTrack) -> RowDone:
        tokenizer = self._model.tokenizer
        generation = Generation(call, prepared.requests, tokenizer, tokens, track)
        frames = _FRAMES[prepared.task.url](call, self._model.model_id, tokenizer, generation.prompts)
        async with aclosing(generation.deltas()) as deltas:
            body = await whole_body(call, generation, deltas, frames)
        usage = generation.usage
        return RowDone(
            prepared.task.row,
            OK,
            self._signed(body),
            prepared.num_prompt_tokens,
            usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens or 0,
            cached_tokens=generation.cached_tokens,
        )

    def _signed(self, body: bytes) -> bytes:
        """Return a JSON object that says which weights and code made it, where OpenAI's clients look.

        Not how they round: that is measured anew by each machine, and the same job is to write the same rows.
        """
        replicas = self._source.ledger.replicas
        if not replicas:
            return body
        return body[:-1] + b',"system_fingerprint":' + json.encode(but_for_rounding(replicas)) + b"}"


def failed(row: int, error: ApiError) -> RowDone:
    """Return the result of a row that ended in an error."""
    return RowDone(row, error.status, json.encode(error.body()), code=error.code)


@dataclass(frozen=True, slots=True)
class RowSource:
    """What rows get their tokens from, and where these are written down.

    Only replicas with the fingerprint that the ledger agreed on draw them; where none is agreed on yet, that of the
    first token that comes. on_drawn: called with a row that has all its tokens, before its answer is made of them.
    """

    source: TokenLogSource
    ledger: Ledger
    ticker: Ticker
    on_drawn: Callable[[int], object] = lambda _: None


class TokenLogSource(TokenSource, Protocol):
    """A `TokenSource` whose token logs can be looked at while requests run: the dispatcher."""

    @property
    def fingerprint(self) -> str | None:
        """Of the model that the replicas run, where there is a replica and all run the same."""

    def log_of(self, request_id: str) -> TokenLog | None:
        """Return the log of a live request."""
        ...


class RowTokens:
    """A `TokenSource` for the requests of one row. What stands behind an @ in a request's name is a part of it.

    Its tokens are written down every tick, and read, which costs more, now and then and at the end. Choice `c` of
    request `r` is choice `r x n + c` of the row in the ledger. kept: whether tokens are written down; where not, a
    row that is broken off begins anew.
    """

    def __init__(self, row: int, requests: Sequence[Request], of: RowSource, kept: bool) -> None:
        self._row = row
        self._first = {one.request_id: i * one.params.n for i, one in enumerate(requests)}
        self._running = set(self._first)
        self._of = of
        self._kept = kept
        self._ended: set[tuple[str, int]] = set()
        if not kept:
            of.ledger.forget_tokens(row)

    async def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncGenerator[TokenChunk, None]:
        """See `TokenSource.generate`."""
        known = self._known(request)
        for choice, found in known.items():
            if found.tokens or found.finish:
                yield TokenChunk(choice, tuple(found.tokens), tuple(found.logprobs), found.finish)
        resumed = self._resumed(request, known)
        if resumed is None:
            return
        reading = _Reading(resumed)
        again = True
        while again:
            again = False
            async with aclosing(self._chunks(reading, context)) as chunks:
                try:
                    async for chunk in chunks:
                        if not self._is_agreed(reading.log):
                            again = True  # it began before a replica was there, and came to another model's
                            break
                        reading.hold(chunk)
                        self._note(reading)
                        yield chunk
                        if reading.is_over():
                            await self._of.ticker.until(lambda: self._due(reading))
                            self._note(reading)  # at once before it is taken: chunks on their way can be lost
                finally:
                    self._note(reading)  # of one that is recalled or stopped, nothing is drawn again

    def finish_choice(self, request_id: str, choice: int) -> None:
        """See `TokenSource.finish_choice`."""
        self._ended.add((request_id, choice))
        self._of.source.finish_choice(request_id, choice)

    def _chunks(self, reading: _Reading, context: CallContext) -> AsyncGenerator[TokenChunk, None]:
        """Begin to run what is read; its log is found once it is there, before any token can be."""
        name, pin = reading.request.request_id, self._of.ledger.replicas
        reading.log = None

        def find() -> None:
            reading.log = self._of.source.log_of(name)

        asyncio.get_running_loop().call_soon(find)
        source = self._of.source.generate(reading.request, replace(context, fingerprint=pin))
        return cast("AsyncGenerator[TokenChunk, None]", source)

    def _is_agreed(self, log: TokenLog | None) -> bool:
        """Whether a request's tokens are of the model that the batch keeps to: that of the first ones."""
        ledger, fingerprint = self._of.ledger, None if log is None else log.fingerprint
        if ledger.replicas is None and fingerprint is not None:
            ledger.agree_on(fingerprint)
        return fingerprint in (None, ledger.replicas)

    def _known(self, request: Request) -> Mapping[int, ChoiceTokens]:
        choices = self._of.ledger.partial.get(self._row, {})
        first = self._first[_row_name(request)]
        # Copied, for the ledger goes on with the same lists.
        return {
            c: ChoiceTokens(list(found.tokens), found.finish, list(found.logprobs))
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

    def _due(self, reading: _Reading) -> bool:
        """Write down what came; return whether it is time to read it."""
        self._note(reading)
        log = self._of.source.log_of(reading.request.request_id)
        reading.ticks += 1
        if log is not None and log.finished:
            self._running.discard(_row_name(reading.request))
            if not self._running:
                self._of.on_drawn(self._row)
        return log is None or log.finished or log.error is not None or reading.ticks >= reading.patience

    def _note(self, reading: _Reading) -> None:
        name = reading.request.request_id
        # Held here: of a row that is recalled with its first tokens, the source has let go by now.
        log = reading.log if self._kept and self._is_agreed(reading.log) else None
        for choice, its in log.choices.items() if log is not None else ():
            if (name, choice) in self._ended:
                continue  # its text ended it, not its tokens: read again, they end it again
            place, logprobs = reading.places[choice], reading.logprobs(its)
            end = len(its.tokens) if logprobs is None else place + len(logprobs)
            finish = its.finish_reason if end == len(its.tokens) else None
            if end > place or (finish is not None and choice not in reading.ended):
                reading.places[choice] = end
                if finish is not None:
                    reading.ended.add(choice)
                number, new = self._first[_row_name(reading.request)] + choice, tuple(its.tokens[place:end])
                self._of.ledger.note_tokens(NewTokens(self._row, number, place, new, finish, logprobs or ()))


class _Reading:
    """How far a request was read and written down.

    places: tokens of each choice that are written down, at first those that it comes with. log: of the attempt, once
    it is there.
    """

    def __init__(self, request: Request) -> None:
        resume = request.resume or {}
        places = {choice: len(resume.get(choice, ())) for choice in range(request.params.n)}
        self.request = request
        self.places = places
        self.log: TokenLog | None = None
        self.ended: set[int] = set()  # choices whose end is written down
        self.ticks = 0  # since the last reading
        self.patience = WATCH_TICKS if request.params.stop or request.params.structured else READ_TICKS
        self._wants_logprobs = request.params.logprobs is not None
        self._begun_at = dict(places)
        self._read = dict(places)  # tokens of each choice that were read
        self._held: dict[int, list[TokenLogprob]] = {choice: [] for choice in places}
        self._running = request.params.n if request.resume is None else len(request.resume)

    def hold(self, chunk: TokenChunk) -> None:
        """Note that a chunk was read; its log has given its log-probabilities away."""
        self._read[chunk.choice] += len(chunk.token_ids)
        self._held[chunk.choice] += chunk.logprobs
        self._running -= chunk.finish_reason is not None

    def logprobs(self, its: ChoiceLog) -> tuple[TokenLogprob, ...] | None:
        """Return those of tokens that are not written down, as far as they are known; None where none are wanted."""
        if not self._wants_logprobs:
            return None
        held = self._held[its.choice]
        known = held if self._comes(its) else [*held, *its.logprobs]
        return tuple(known[self.places[its.choice] - self._begun_at[its.choice] :])

    def is_over(self) -> bool:
        """Whether nothing that was taken is still to be read, and some choice runs on; begins to count ticks then."""
        if not self._running or self.log is None or any(self._comes(its) for its in self.log.choices.values()):
            return False
        self.ticks = 0
        return True

    def _comes(self, its: ChoiceLog) -> bool:
        """Whether a chunk of a choice that runs was taken, and is to be read next."""
        return its.delivered != self._read[its.choice] and not its.finish_told


def _row_name(request: Request) -> str:
    """The name by which the row knows a request, of which this one may be a part."""
    return request.request_id.partition("@")[0]


class Ticker:
    """Every `period` seconds: asks all that wait whether they are due, calls each of `on_tick`, lets the due go on.

    Used on one event loop.
    """

    def __init__(self, on_tick: Sequence[Callable[[], None]], period: float = TICK) -> None:
        self._on_tick = on_tick
        self._period = period
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    async def until(self, due: Callable[[], bool]) -> None:
        """Return after the first tick at which `due()` is true; it is asked once a tick."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[future] = due
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    async def run(self) -> None:
        """Tick until cancelled. Raises what they raise."""
        while True:
            await asyncio.sleep(self._period)
            over = [future for future, due in self._waiting.items() if due()]
            for act in self._on_tick:
                act()
            for future in over:
                # One at a time: making the text of many rows that end at once must not keep the next ones waiting.
                await asyncio.sleep(0)
                if not future.done():
                    future.set_result(None)
