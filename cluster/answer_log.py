"""How an answer outlives its router: what the router tells the ingress of it, and what the next router is given.

All of it travels beside the messages of ASGI, between Serve's proxy and the routers; clients can put nothing there.
Whoever holds the client's connection keeps it without reading it (`cluster.ingress.exchange`). The next router makes
the answer again from the same facts and the same chunks, and so to the same bytes, and goes on behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, msgpack

from cluster.errors import ApiError
from cluster.token_source import TokenChunk, do_nothing
from engine.report import TokenLogprob

NOTE = "squadron.note"  # type of a router's message that is for the ingress alone
KEPT = "squadron.kept"  # key of any message of a router: what is to be kept of the answer, `bytes`
ROUTER_WAIT = "squadron.router_wait"  # key of the first one: seconds that an answer may wait for another router
ASKS = "squadron.asks"  # key of one of a router that may have been left: when it asks, by its own clock
LISTENS = "squadron.listens"  # type of the answer to one that was not left: `asked_at`, as it came
LETS_GO = "squadron.lets_go"  # key of a router's last message of an answer that another one is to go on with
NO_ROUTER = "squadron.no_router"  # type of a gateway's message to itself while an exchange waits for a first router
UNKEPT = "squadron.unkept"  # type of the ingress' message that it has no room to keep the answer any more
KEEPS = "squadron.keeps"  # key of the scope of a request: name of its exchange, "" = the ingress keeps nothing of it
CONTINUES = "squadron.continues"  # key of the scope of a request that is asked again: a `dict` of the next two
NOTES = "notes"  # all that was kept, in order: a list of `bytes`
ELAPSED = "elapsed"  # seconds since the client sent the request
# The ingress looks every `TICK` seconds whether a router lives, and leaves one of which it heard nothing at `LEASE`
# looks for another one. So a router that was silent for `SILENCE` seconds may have been left.
TICK, LEASE = 1.0, 5
SILENCE = (LEASE - 1) * TICK
ANSWER_LOG = "answer_log"  # key of `scope["state"]` in a router: the exchange's `AnswerLog`


class AnswerFacts(Struct, frozen=True, array_like=True):
    """What an answer shows, or is drawn with, that its request does not say.

    created: seconds since 1970. asked: digest of what the router made of the request, b"" = of any.
    """

    request_id: str
    created: int
    seed: int
    asked: bytes = b""


class _Chunk(Struct, frozen=True, array_like=True):
    """A `TokenChunk` as it is kept. number: of the request within the call. fingerprint: None = as the one before."""

    number: int
    choice: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_cached_tokens: int
    fingerprint: str | None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class _Note(Struct, frozen=True, array_like=True):
    facts: AnswerFacts | None
    chunks: list[_Chunk]


_encode = msgpack.Encoder().encode
_decode = msgpack.Decoder(_Note).decode


@dataclass
class Kept:
    """How an answer is made that the server keeps: its frames and their numbers depend on its tokens alone.

    request_id: what it goes by. seed: of one whose client gave none; None = random. background: its client waits for
    no token. coming: what another router has of it behind `AnswerLog.past`, instead of computing it; None = computes
    it. completed_at: when it was complete, where that is known (seconds since 1970). stopped_by: the
    error with which the server ends it before it is complete. on_begun: called when the request was accepted.
    error: what ended it, where that is known.
    """

    request_id: str
    seed: int | None = None
    background: bool = False
    coming: Callable[[], AsyncIterator[tuple[int, TokenChunk]]] | None = None
    completed_at: int | None = None
    stopped_by: ApiError | None = None
    on_begun: Callable[[], None] = do_nothing
    error: ApiError | None = None


async def _at_once() -> None:
    """Wait for nothing."""


class AnswerLog:
    """What must be known of one answer to go on with it elsewhere. Used on one event loop.

    continues: whether an earlier router had the request, and was lost. facts: of the answer, None until some router
    knew them. past: number of the request and chunk, in order, as the earlier routers had them. elapsed: seconds
    since the client sent the request to the first of them. told_facts: whether a router that is asked after this one
    knows the facts. exchange: its name, which all routers get that are asked; "" without one. kept: of an answer that
    the server keeps, None of others. until_heard: returns once the ingress has not left this router, for all one can
    see; where it has, the request is cancelled. is_let_go: this router leaves, so that the ingress asks another one.
    """

    kept: Kept | None = None
    until_heard: Callable[[], Awaitable[None]] = staticmethod(_at_once)

    def __init__(self, notes: Sequence[bytes] | None = None, elapsed: float = 0.0, exchange: str = "") -> None:
        self.continues = notes is not None
        self.exchange = exchange
        self.facts: AnswerFacts | None = None
        self.past: list[tuple[int, TokenChunk]] = []
        self.elapsed = elapsed
        self.told_facts = False
        self._new: list[_Chunk] = []
        self._untold: AnswerFacts | None = None
        self._told_fingerprint: str | None = None
        self._spoke_at: float | None = None  # None = the ingress asks no other router
        self._silent_at: float | None = None  # when a silence ended in which the ingress may have left this router
        self._facts_at: float | None = None  # when the facts were sent after it
        self._heard = asyncio.Event()
        self.is_let_go = False
        for note in map(_decode, notes or ()):
            self.facts = self.facts or note.facts
            self.past += [(chunk.number, _chunk(chunk)) for chunk in note.chunks]

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> AnswerLog:
        """Return the log of a request as a router gets it."""
        given: dict[str, Any] | None = scope.get(CONTINUES)
        keeps = scope.get(KEEPS)
        exchange = keeps if isinstance(keeps, str) else ""  # an ingress of an earlier version says True
        return cls(exchange=exchange) if given is None else cls(given[NOTES], given[ELAPSED], exchange)

    @property
    def fingerprint(self) -> str | None:
        """Of the model whose tokens came so far, None before the first."""
        return next((chunk.fingerprint for _, chunk in reversed(self.past) if chunk.fingerprint is not None), None)

    @property
    def has_news(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._new) or self._untold is not None

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether the ingress may have asked another router: this one was silent for long, or has let go."""
        now = asyncio.get_running_loop().time()
        return self.is_let_go or self._silent_at is not None or self._is_silent(now)

    def spoke(self, since: float | None = None) -> None:
        """Take note that the ingress hears something of this router, from now on again and again.

        since: when it may have sent a request that it has heard nothing of, on the event loop's clock; None = it has.
        """
        now = asyncio.get_running_loop().time()
        if self._is_silent(now):
            self._silent_at = now
        self._spoke_at = now if since is None else since

    def listens(self, asked_at: float) -> None:
        """Take note that the ingress had not left this router when that asked, and has what it was sent before."""
        if self._facts_at is not None and self._facts_at <= asked_at:
            self.told_facts = True
        if self._silent_at is not None and self._silent_at <= asked_at:
            self._silent_at = None
            self._heard.set()

    async def heard(self) -> None:
        """Wait until the ingress is known to listen."""
        while self.is_let_go or self._silent_at is not None:
            self._heard.clear()
            await self._heard.wait()

    def let_go(self) -> None:
        """Take note that the ingress has to ask another router, which goes on with the answer.

        That one has the facts in any case: what is untold goes with the last word.
        """
        self.is_let_go = True
        self.told_facts |= self._untold is not None

    def is_answered(self) -> None:
        """Take note that the ingress has taken the answer to its end: it asks no other router."""
        self._spoke_at = self._silent_at = None

    def _is_silent(self, now: float) -> bool:
        return self._spoke_at is not None and now - self._spoke_at >= SILENCE

    def begin(self, facts: AnswerFacts) -> AnswerFacts:
        """Return the facts of the answer: those that it was begun with, else `facts`."""
        if self.facts is None:
            self.facts = self._untold = facts
        return self.facts

    def withdraw(self) -> None:
        """Tell nobody how the answer was begun: another router would go on with it, and nothing was charged."""
        self._untold = None

    def add(self, number: int, chunk: TokenChunk) -> None:
        """Take in what came for request `number` of the call; it is told with what the answer makes of it."""
        fingerprint = None if chunk.fingerprint == self._told_fingerprint else chunk.fingerprint
        self._told_fingerprint = chunk.fingerprint
        self._new.append(
            _Chunk(
                number,
                chunk.choice,
                chunk.token_ids,
                chunk.finish_reason,
                chunk.num_cached_tokens,
                fingerprint,
                chunk.logprobs,
                chunk.prompt_logprobs,
            )
        )

    def take(self) -> bytes | None:
        """Return what is to be kept beside all that was taken before, None for nothing."""
        if not self.has_news:
            return None
        note = _Note(self._untold, self._new)
        if self._untold is not None and self.may_be_elsewhere:
            self._facts_at = asyncio.get_running_loop().time()
        elif self._untold is not None:
            self.told_facts = True
        self._untold, self._new = None, []
        return _encode(note)


class NoLog(AnswerLog):
    """The log of an answer that nobody keeps."""

    def add(self, number: int, chunk: TokenChunk) -> None:
        """Keep nothing."""


def _chunk(kept: _Chunk) -> TokenChunk:
    return TokenChunk(
        kept.choice,
        kept.token_ids,
        kept.logprobs,
        kept.finish_reason,
        kept.num_cached_tokens,
        kept.prompt_logprobs,
        fingerprint=kept.fingerprint,
    )
