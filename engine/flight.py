"""A flight recorder: what the latest requests waited for, those that had to wait at all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

MAX_REQUESTS = 1024
MAX_EVENTS = 64  # of one request


class Wait(StrEnum):
    """What a request waits for from here on, or the end of a wait: six of a router's, then those of a replica."""

    TURN = "turn"  # its tenant's turn
    LET_IN = "let_in"
    REPLICA = "replica"  # a replica that takes it
    MIGRATION = "migration"  # another replica, for the one that ran it is lost or leaves
    SENT = "sent"  # to a replica
    DONE = "done"
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
        self._events: OrderedDict[str, list[_Plain]] = OrderedDict()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._events

    def note(self, request_id: str, what: Wait, detail: str = "", at: float | None = None) -> None:
        """Note what a request waits for, or that it waits no more. at: unless it is now."""
        event = (self.clock() if at is None else at, what, detail)
        with self._lock:
            events = self._events.get(request_id)
            if events is None:
                self._events[request_id] = [event]
                if len(self._events) > self._max_requests:
                    self._events.popitem(last=False)
            else:
                if len(events) >= self._max_events:
                    del events[self._max_events // 2]
                events.append(event)

    def story(self, request_id: str) -> Sequence[Event]:
        """Return the events of one request, none where it did not wait."""
        if request_id not in self._events:
            return ()
        with self._lock:
            return [Event(*event) for event in self._events.get(request_id, ())]

    def of(self, name: str) -> list[Event]:
        """Return the events of all requests of a name: `name` itself, and with `-` or `@` and more behind it."""
        with self._lock:
            found = [Event(*one) for key, events in self._events.items() if is_of(key, name) for one in events]
        return sorted(found, key=lambda event: event.at)

    def everything(self) -> Mapping[str, Sequence[Event]]:
        """Return a copy of all that is known, for a dump."""
        with self._lock:
            return {key: [Event(*event) for event in events] for key, events in self._events.items()}


class WaitLog:
    """Notes what a scheduler lets sequences wait for, once for each change. Used by the engine's one thread.

    now: seconds at which the step began; set by whoever runs the steps.
    """

    def __init__(self, flight: FlightRecorder, now: float) -> None:
        self.now = now
        self._flight = flight
        self._head: tuple[str, Wait] | None = None
        self._crowded = float("-inf")  # when a step last left somebody in the queue
        self._starved: set[str] = set()

    def head_waits(self, request_id: str, what: Wait, detail: Callable[[], str]) -> None:
        """Note why the first in the queue cannot start. Cheap while that does not change."""
        self._crowded = self.now
        if self._head != (request_id, what):
            self._head = (request_id, what)
            self._flight.note(request_id, what, detail(), self.now)

    def starts(self, request_id: str, arrival: float, preempted: bool) -> None:
        """Note that a sequence starts to run, where it had to wait; `arrival` in seconds."""
        if arrival < self._crowded or preempted:
            if request_id not in self._flight:
                self._flight.note(request_id, Wait.QUEUE, "behind others", arrival)
            self._flight.note(request_id, Wait.RUNS, "", self.now)
            self._head = None

    def preempted(self, request_id: str) -> None:
        """Note that a running sequence lost its blocks."""
        self._flight.note(request_id, Wait.PREEMPTION, "its blocks were taken for another", self.now)

    @property
    def any_starved(self) -> bool:
        """Whether some of the running got no token of the last step."""
        return bool(self._starved)

    def starved(self, request_ids: set[str]) -> None:
        """Note which of the running get no token of this step."""
        for request_id in request_ids - self._starved:
            self._flight.note(request_id, Wait.BUDGET, "runs, but the step's tokens go to others", self.now)
        for request_id in self._starved - request_ids:
            self._flight.note(request_id, Wait.RUNS, "", self.now)
        self._starved = request_ids

    def ended(self, request_id: str, how: Callable[[], str]) -> None:
        """Note the end of a sequence, where anything was noted of its request."""
        self._starved.discard(request_id)
        if request_id in self._flight:
            self._flight.note(request_id, Wait.ENDED, how())


def is_of(key: str, name: str) -> bool:
    """Whether the request `key` is (a part of, or an attempt at) the one that its client knows as `name`."""
    return key.startswith(name) and key[len(name) : len(name) + 1] in ("", "-", "@")
