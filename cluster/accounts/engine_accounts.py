"""From the events of an engine: what its requests waited for, and their use of devices and blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.accounts.costs import CostMeter, EngineCosts, EngineUsage
from cluster.accounts.flight_recorder import BEHIND, FlightRecorder, Wait
from engine.events import (
    Added,
    Began,
    BlocksTaken,
    Crowded,
    Ended,
    EngineEvent,
    Idle,
    Left,
    Preempted,
    Ran,
    Stalled,
    Started,
    Starved,
)
from engine.request import Request, Sequence


class EngineAccounts:
    """Listens to one engine (`EngineCore.call_on_event`). Only `flight` and `used` may be asked from other threads.

    flight: what requests had to wait for, those that had to; each wait once. clock: the engine's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.flight = FlightRecorder(clock)
        self._meter = CostMeter()
        self._stalled: tuple[str, Wait] | None = None  # the first of the queue, as it was noted last
        self._crowded = float("-inf")  # when a step last left a request in the queue
        self._new: dict[str, tuple[Request, float]] = {}  # came since, with their arrivals
        self._starved: dict[str, str] = {}  # id -> tenant
        self._handlers: dict[type[EngineEvent], Callable[[Any], None]] = {
            Began: self._meter.begin,
            Idle: self._meter.idle,
            Ran: self._meter.ran,
            BlocksTaken: self._meter.took,
            Left: self._meter.left,
            Added: self._added,
            Stalled: self._on_stalled,
            Crowded: self._on_crowded,
            Started: self._started,
            Preempted: self._preempted,
            Starved: self._on_starved,
            Ended: self._ended,
        }

    def note(self, event: EngineEvent) -> None:
        """Take in an event, in the order in which they happen."""
        self._handlers[type(event)](event)

    def costs(self) -> EngineCosts:
        """Return all accounts until the last `Idle` or `Ran`."""
        return self._meter.costs()

    def used(self, sequence: Sequence) -> EngineUsage:
        """Return what a sequence has used whose `Ended` was noted."""
        return self._meter.used(sequence)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the accounts add up to the time that passed."""
        self._meter.check_integrity()

    def _added(self, event: Added) -> None:
        """Keep it until the next step shows whether it has to wait."""
        self._new[event.request.request_id] = event.request, event.at

    def _on_stalled(self, event: Stalled) -> None:
        request, what = event.request, Wait(event.lack.value)
        self._new.pop(request.request_id, None)
        if self._stalled != (request.request_id, what):
            self._stalled = (request.request_id, what)
            self.flight.note(request.request_id, what, event.detail, event.at, request.tenant)

    def _on_crowded(self, event: Crowded) -> None:
        """Requests that came and did not start wait behind the first."""
        self._crowded = event.at
        for request, arrival in self._new.values():
            self.flight.note(request.request_id, Wait.QUEUE, BEHIND, arrival, request.tenant)
        self._new.clear()

    def _started(self, event: Started) -> None:
        sequence, request = event.sequence, event.sequence.request
        name, arrival = request.request_id, sequence.arrival_time
        self._new.pop(name, None)
        compiled = request.params.structured is not None and name in self.flight
        if arrival < self._crowded or sequence.preemptions or compiled:
            if name not in self.flight:  # forgotten, so many wait
                self.flight.note(name, Wait.QUEUE, BEHIND, arrival, request.tenant)
            self.flight.note(name, Wait.RUNS, "", event.at, request.tenant)
            self._stalled = None

    def _preempted(self, event: Preempted) -> None:
        request = event.request
        self._starved.pop(request.request_id, None)
        detail = "its blocks were taken for another"
        self.flight.note(request.request_id, Wait.PREEMPTION, detail, event.at, request.tenant)

    def _on_starved(self, event: Starved) -> None:
        starved = {request.request_id: request.tenant for request in event.requests}
        for name in starved.keys() - self._starved:
            detail = "runs, but the step's tokens go to others"
            self.flight.note(name, Wait.BUDGET, detail, event.at, starved[name])
        for name in self._starved.keys() - starved:
            self.flight.note(name, Wait.RUNS, "", event.at, self._starved[name])
        self._starved = starved

    def _ended(self, event: Ended) -> None:
        finish, one = event.finish, event.finish.sequence
        self._meter.settle()
        name = one.request.request_id
        self._new.pop(name, None)
        self._starved.pop(name, None)
        if name in self.flight:
            usage = self._meter.used(one)
            used = f"{usage.device_ns / 1e9:.3f} s of a device, {usage.block_ns / 1e9:.3f} s of a KV block"
            end = finish.code or finish.reason.value
            self.flight.note(
                name, Wait.ENDED, f"choice {one.index}: {end} after {one.num_output_tokens} tokens; {used}"
            )
