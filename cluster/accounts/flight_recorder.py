"""A flight recorder: what the latest requests waited for, those that had to wait at all."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

MAX_REQUESTS = 1024
MAX_EVENTS = 64  # of one request
MAX_TOLD = 1024  # events of one answer, so that it fits a message
BEHIND = "behind others"
_PART = re.compile(r"(-[0-9]{1,9})?(@.*)?")  # what stands behind a name: a prompt's number, an attempt


class Wait(StrEnum):
    """What a request waits for from here on, or the end of a wait: six of a router's, then those of a replica."""

    TURN = "turn"  # its tenant's turn
    LET_IN = "let_in"
    REPLICA = "replica"  # a replica that takes it
    MIGRATION = "migration"  # another replica, for the one that ran it is lost or leaves
    SENT = "sent"  # to a replica
    DONE = "done"
    GRAMMAR = "grammar"  # what its output must match, which is compiled
    QUEUE = "queue"  # those before it
    BUDGET = "budget"  # tokens of a step: those of others use all of them up
    SLOTS = "slots"  # a place among `max_num_seqs`
    BLOCKS = "blocks"  # free KV blocks
    PREEMPTION = "preemption"  # to be computed again: its blocks were taken for another
    RUNS = "runs"
    ENDED = "ended"


class WaitEvent(NamedTuple):
    """Seconds on the recorder's clock, what began then, and more in words."""

    at: float
    what: Wait
    detail: str = ""


_Plain = tuple[float, Wait, str]  # an `WaitEvent`, which takes longer to make


class _Story(NamedTuple):
    tenant: str
    events: list[_Plain]


class FlightRecorder:
    """Events by request, in order, the requests by their first event. From any thread.

    Of more than `max_requests` the oldest are forgotten, of more than `max_events` of one request some in the middle.
    clock: seconds.
    """

    def __init__(
        self, clock: Callable[[], float], max_requests: int = MAX_REQUESTS, max_events: int = MAX_EVENTS
    ) -> None:
        self.clock = clock
        self._max_requests = max_requests
        self._max_events = max_events
        self._lock = threading.Lock()
        self._stories: OrderedDict[str, _Story] = OrderedDict()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._stories

    def note(self, request_id: str, what: Wait, detail: str = "", at: float | None = None, tenant: str = "") -> None:
        """Note what a request waits for, or that it waits no more. at: unless it is now.

        tenant: that sent the request, for its first event.
        """
        event = (self.clock() if at is None else at, what, detail)
        with self._lock:
            story = self._stories.get(request_id)
            if story is None:
                self._stories[request_id] = _Story(tenant, [event])
                if len(self._stories) > self._max_requests:
                    self._stories.popitem(last=False)
            else:
                if len(story.events) >= self._max_events:
                    del story.events[self._max_events // 2]
                story.events.append(event)

    def story(self, request_id: str) -> Sequence[WaitEvent]:
        """Return the events of one request, none where it did not wait."""
        if request_id not in self._stories:
            return ()
        with self._lock:
            story = self._stories.get(request_id)
            return () if story is None else [WaitEvent(*event) for event in story.events]

    def of(self, name: str, tenant: str | None = None) -> list[WaitEvent]:
        """Return the events of a tenant's requests of a name (`is_of`), the last of them where there are very many.

        tenant: None = of any.
        """
        with self._lock:
            stories = [story for key, story in self._stories.items() if is_of(key, name)]
            found = [WaitEvent(*one) for owner, events in stories if tenant in (None, owner) for one in events]
        return sorted(found, key=lambda event: event.at)[-MAX_TOLD:]

    def everything(self) -> Mapping[str, Sequence[WaitEvent]]:
        """Return a copy of all that is known, for a dump."""
        with self._lock:
            return {key: [WaitEvent(*event) for event in story.events] for key, story in self._stories.items()}


def is_of(key: str, name: str) -> bool:
    """Whether the request `key` is (a part of, or an attempt at) the one that its client knows as `name`.

    The beginning of a name does not match: a client finds only requests whose whole names it knows.
    """
    return key.startswith(name) and _PART.fullmatch(key, len(name)) is not None
