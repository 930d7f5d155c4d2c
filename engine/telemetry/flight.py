"""A flight recorder: what the latest requests waited for, those that had to wait at all."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from engine.request import Request

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


class Event(NamedTuple):
    """Seconds on the recorder's clock, what began then, and more in words."""

    at: float
    what: Wait
    detail: str = ""


_Plain = tuple[float, Wait, str]  # an `Event`, which takes longer to make


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

        tenant: whose request it is, for its first event.
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

    def story(self, request_id: str) -> Sequence[Event]:
        """Return the events of one request, none where it did not wait."""
        if request_id not in self._stories:
            return ()
        with self._lock:
            story = self._stories.get(request_id)
            return () if story is None else [Event(*event) for event in story.events]

    def of(self, name: str, tenant: str | None = None) -> list[Event]:
        """Return the events of a tenant's requests of a name (`is_of`), the last of them where there are very many.

        tenant: None = whosever they are.
        """
        with self._lock:
            stories = [story for key, story in self._stories.items() if is_of(key, name)]
            found = [Event(*one) for owner, events in stories if tenant in (None, owner) for one in events]
        return sorted(found, key=lambda event: event.at)[-MAX_TOLD:]

    def everything(self) -> Mapping[str, Sequence[Event]]:
        """Return a copy of all that is known, for a dump."""
        with self._lock:
            return {key: [Event(*event) for event in story.events] for key, story in self._stories.items()}


class WaitLog:
    """Notes what a scheduler lets sequences wait for, once for each change. Used by the engine's one thread.

    now: seconds at which the step began; set by whoever runs the steps.
    """

    def __init__(self, flight: FlightRecorder, now: float) -> None:
        self.now = now
        self._flight = flight
        self._head: tuple[str, Wait] | None = None
        self._crowded = float("-inf")  # when a step last left somebody in the queue
        self._new: dict[str, tuple[Request, float]] = {}  # came since, with their arrivals
        self._starved: dict[str, str] = {}  # id -> tenant

    def arrives(self, request: Request, arrival: float) -> None:
        """Note that a request is in the queue; whether it has to wait the next step shows. arrival: seconds."""
        self._new[request.request_id] = request, arrival

    def head_waits(self, request: Request, what: Wait, detail: Callable[[], str]) -> None:
        """Note why the first in the queue cannot start. Cheap while that does not change."""
        self._crowded = self.now
        if self._head != (request.request_id, what):
            self._head = (request.request_id, what)
            self._new.pop(request.request_id, None)
            self._note(request, what, detail())

    def others_wait(self) -> None:
        """Note that those who came and did not start wait behind the first. Cheap while nobody comes."""
        for request, arrival in self._new.values():
            self._flight.note(request.request_id, Wait.QUEUE, BEHIND, arrival, request.tenant)
        self._new.clear()

    def starts(self, request: Request, arrival: float, preempted: bool) -> None:
        """Note that a sequence starts to run, where it had to wait; `arrival` in seconds."""
        self._new.pop(request.request_id, None)
        compiled = request.params.structured is not None and request.request_id in self._flight
        if arrival < self._crowded or preempted or compiled:
            if request.request_id not in self._flight:  # forgotten, so many wait
                self._flight.note(request.request_id, Wait.QUEUE, BEHIND, arrival, request.tenant)
            self._note(request, Wait.RUNS)
            self._head = None

    def preempted(self, request: Request) -> None:
        """Note that a running sequence lost its blocks."""
        self._starved.pop(request.request_id, None)
        self._note(request, Wait.PREEMPTION, "its blocks were taken for another")

    @property
    def any_starved(self) -> bool:
        """Whether some of the running got no token of the last step."""
        return bool(self._starved)

    def starved(self, requests: Iterable[Request]) -> None:
        """Note which of the running get no token of this step."""
        starved = {request.request_id: request.tenant for request in requests}
        for name in starved.keys() - self._starved:
            detail = "runs, but the step's tokens go to others"
            self._flight.note(name, Wait.BUDGET, detail, self.now, starved[name])
        for name in self._starved.keys() - starved:
            self._flight.note(name, Wait.RUNS, "", self.now, self._starved[name])
        self._starved = starved

    def ended(self, request_id: str, how: Callable[[], str]) -> None:
        """Note the end of a sequence, where anything was noted of its request."""
        self._new.pop(request_id, None)
        self._starved.pop(request_id, None)
        if request_id in self._flight:
            self._flight.note(request_id, Wait.ENDED, how())

    def _note(self, request: Request, what: Wait, detail: str = "") -> None:
        self._flight.note(request.request_id, what, detail, self.now, request.tenant)


def is_of(key: str, name: str) -> bool:
    """Whether the request `key` is (a part of, or an attempt at) the one that its client knows as `name`.

    The beginning of a name is none: nobody is to find requests whose names he was not told.
    """
    return key.startswith(name) and _PART.fullmatch(key, len(name)) is not None
