"""The room that admitted requests take up in the replicas: how much is taken, and whether one more may go in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from engine.request import Request

# Of the bound, the share of one tenant's and of all requests that may be in a replica without taking up room, since
# what their output must match may have to be compiled there; and how many of one tenant's may in any case.
_SHARE_ASIDE, _ALL_ASIDE, _LEAST_ASIDE = 8, 2, 4


class QueuedRequest:
    """One request before it goes in, and inside.

    cost: what its tenant is charged when it goes in. work: tokens to be computed for it, an estimate.
    held: tokens of room that it takes up inside. waits: whether it stands in the queue, since `since`.
    came_to_none: whether there was no replica then. compiles: whether what its output must match may have to be
    compiled first, in the replica. aside: whether it went in and takes up no room yet, since that may be so.
    """

    __slots__ = (
        "aside",
        "called",
        "came_to_none",
        "compiles",
        "cost",
        "deadline",
        "held",
        "inside",
        "priority",
        "prompt",
        "request",
        "sequences",
        "since",
        "tenant",
        "waits",
        "work",
    )

    def __init__(self, tenant: str, request: Request) -> None:
        self.tenant = tenant
        self.request = request
        self.prompt = len(request.prompt_token_ids)
        self.sequences = len(request.resume) if request.resume else request.params.n
        self.cost = self.prompt + self.sequences
        self.priority = request.priority
        self.deadline = request.deadline
        self.work = self.cost
        self.held = 0
        self.since = 0.0
        self.called: asyncio.Future[None] | None = None
        self.waits = False
        self.came_to_none = False
        self.inside = False
        self.compiles = request.params.structured is not None
        self.aside = False


class Inflight:
    """Counts what was handed on and has not ended. Used on one event loop.

    bound: sequences that may be inside at once, asked each time; token_bound: the same in tokens of prompts and
    expected output. A request may go over either, so that a large one is never passed over for ever.
    sequences / tokens: inside now, without requests that may wait for a compiler.
    """

    def __init__(self, bound: Callable[[], int], token_bound: Callable[[], int]) -> None:
        self.sequences = 0
        self.tokens = 0
        self._bound = bound
        self._token_bound = token_bound
        self._aside: Counter[str] = Counter()  # tenant -> its requests inside that take up no room yet

    def has_room(self) -> bool:
        """Whether one more may go in."""
        return self.sequences < self._bound() and self.tokens < self._token_bound()

    def is_empty(self) -> bool:
        """Whether nothing is inside."""
        return not self.sequences and not self._aside

    def may_enter(self, queued: QueuedRequest) -> bool:
        """Whether a request may go in where there is room: those that a compiler may keep waiting are few at a time.

        They take up no room meanwhile, or a tenant's slow grammars would keep everybody out; and once they do, they
        go over the bound by no more than so many.
        """
        if not queued.compiles:
            return True
        bound = self._bound()
        most = max(_LEAST_ASIDE, bound // _SHARE_ASIDE)
        return self._aside[queued.tenant] < most and self._aside.total() < max(most, bound // _ALL_ASIDE)

    def enter(self, queued: QueuedRequest) -> None:
        """Count a request that goes in."""
        queued.inside = True
        queued.held = queued.work
        if queued.compiles:
            queued.aside = True
            self._aside[queued.tenant] += 1
        else:
            self._take(queued)

    def begun(self, queued: QueuedRequest) -> None:
        """Count the room of a request that took up none while it may have waited for a compiler."""
        self._end_aside(queued)
        self._take(queued)

    def leave(self, queued: QueuedRequest) -> None:
        """Free the room of a request that is inside."""
        queued.inside = False
        if queued.aside:
            self._end_aside(queued)
        else:
            self.sequences -= queued.sequences
            self.tokens -= queued.held

    def release(self, queued: QueuedRequest, tokens: int) -> None:
        """Free some tokens of a request's room, at most all that it holds."""
        found = min(tokens, queued.held)
        queued.held -= found
        self.tokens -= found

    def _take(self, queued: QueuedRequest) -> None:
        self.sequences += queued.sequences
        self.tokens += queued.held

    def _end_aside(self, queued: QueuedRequest) -> None:
        queued.aside = False
        self._aside[queued.tenant] -= 1
        if not self._aside[queued.tenant]:
            del self._aside[queued.tenant]
