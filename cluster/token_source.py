"""What the router's front ends (HTTP, gRPC, batch) know of generation: requests in, token chunks out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.report import TokenLogprob
from engine.request import Request

if TYPE_CHECKING:
    from cluster.telemetry.tracing.call_trace import CallTrace


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one choice, in order, without gap or repeat over the life of the request.

    finish_reason: "stop" or "length" with the last chunk of the choice, else None.
    logprobs: one per token where the request asked for them, else empty.
    num_cached_tokens: prompt tokens that came from the prefix cache (known from the first chunk on).
    prompt_logprobs: one for each of the next prompt tokens, from the second token on, where the request asked for
    them; all have come before the first output token. They come with choice 0, if that is still open.
    embedding: the pooled state of a request with `pooling`, [hidden]; its one chunk has no tokens.
    fingerprint: of the model that the tokens are of, where it is known.
    """

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] | None = None
    fingerprint: str | None = None


def do_nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """What an ingress knows of a call that decides none of its tokens.

    session_id: what requests of one conversation share (`x-session-id`), "" without.
    waited: seconds that it has stood in line before it was handed on. patience: seconds that it may still wait where
    no replica is there; None = as long as any new request may. fingerprint: of the model that alone may run it, as
    replicas report theirs; None = any that is there. continues: whether it came already, by way of a router that is
    lost. trace: of the call, None where it is not traced.
    on_begin: called once a replica computes something for it, perhaps more than once.
    on_end: called once the request needs no replica any more, though what it brought may still wait to be taken;
    perhaps more than once.
    """

    session_id: str = ""
    waited: float = 0.0
    patience: float | None = None
    fingerprint: str | None = None
    continues: bool = False
    trace: CallTrace | None = None
    on_begin: Callable[[], None] = do_nothing
    on_end: Callable[[], None] = do_nothing


NO_CONTEXT = CallContext()


class TokenSource(Protocol):
    """Anything that turns a request into tokens: the router's dispatcher, or a fake one in tests."""

    def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Yield chunks until every choice has finished; closing the iterator aborts the request.

        A choice whose text is complete early (stop string) is ended with `finish_choice`.
        Raises `ApiError` (the request's one terminal error) instead of ending short.
        """
        ...

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice that the caller needs no more tokens of; others of the request go on."""
        ...
