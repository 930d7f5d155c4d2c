"""Where each live request runs: starting, ending and moving the attempts to run it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.admission.figures import QueueFigures
from cluster.counters import DispatcherCounters
from cluster.dispatch_config import ADMISSION_WAIT, DispatcherConfig
from cluster.errors import ApiError
from cluster.fleet import Fleet
from cluster.link import DRAINED, LinkClosedError, MessageTooLargeError
from cluster.log_lines import about_request
from cluster.member import LiveRequest, Member
from cluster.messages import Abort, Up
from cluster.translation import submit_message
from cluster.waiting_room import WaitingRoom
from engine.flight import FlightRecorder, Wait
from engine.sampling_params import MAX_N

logger = logging.getLogger(__name__)


class Attempts:
    """A request has one attempt at a time, or waits for a replica, or has ended. Used on one event loop."""

    def __init__(
        self, config: DispatcherConfig, fleet: Fleet, counters: DispatcherCounters, flight: FlightRecorder
    ) -> None:
        self._config = config
        self._flight = flight
        self._fleet = fleet
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._waiting_room = WaitingRoom(self._loop, self._give_up)
        self._next_stream = 0
        self.on_waiting: Callable[[], None] = lambda: None  # called when a request has to wait for a replica
        self.last_given_up = float("-inf")

    def place(self, live: LiveRequest) -> None:
        """Submit the request to the replica that suits it best, or let it wait for one."""
        while live.log.error is None:
            member = self._fleet.choose(live)
            if member is None:
                self._park(live)
                return
            if self._submit(live, member):
                return

    def _submit(self, live: LiveRequest, member: Member) -> bool:
        """Return False if the replica turned out to be gone."""
        log = live.log
        stream = self._next_stream
        self._next_stream += MAX_N
        try:
            resume = log.resume() if live.was_submitted else None
            story, now = self._flight.story(live.request_id), self._loop.time()
            trace = None if live.trace is None else live.trace.attempt(live, member.replica_id)
            message = submit_message(log.request, stream, resume, log.num_scored, now, story, trace)
            member.link.send(message)
        except MessageTooLargeError as error:
            self.fail(live, ApiError("body_too_large", str(error), param="prompt"))
        except OverflowError as error:
            self.fail(live, ApiError("invalid_request", f"the request cannot be sent: {error}", param="prompt"))
        except LinkClosedError:
            return False  # whoever reads the link gives it up
        else:
            self._waiting_room.leave(live)
            if story:
                self._note(live, Wait.SENT, f"to replica {member.replica_id}")
            member.attach(live, stream)
            if live.trace is not None:
                live.trace.sent()
            if self._fleet.is_suspect(live):
                member.probe = live
        return True

    def _park(self, live: LiveRequest) -> None:
        if self._fleet.model_changed(live):
            message = "the model was replaced while it ran the request; sent again, it starts anew on the new one"
            self.fail(live, ApiError("model_changed", message))
            return
        if not self._waiting_room.holds(live):
            self._note(live, Wait.REPLICA, "none takes it now")
        self._waiting_room.enter(live, self._patience(live))
        if live.trace is not None:
            live.trace.waits()
        self.on_waiting()

    def _note(self, live: LiveRequest, what: Wait, detail: str) -> None:
        self._flight.note(live.request_id, what, detail, tenant=live.log.request.tenant)

    def _patience(self, live: LiveRequest) -> float:
        """Seconds that a request may wait for a replica."""
        if live.was_submitted:
            return self._config.no_replica_timeout
        wait = self._config.admission_wait
        return max(wait - live.context.waited, min(wait, ADMISSION_WAIT))

    def queue(self) -> QueueFigures:
        """Return what waits for a replica."""
        lives = self._waiting_room.waiting()
        age = self._loop.time() - min((live.accepted_at for live in lives), default=self._loop.time())
        return QueueFigures(len(lives), sum(len(live.log.request.prompt_token_ids) for live in lives), age)

    def place_waiting(self) -> None:
        """Try again for all that wait, the first one first."""
        for live in self._waiting_room.waiting():
            self.place(live)

    def _give_up(self, live: LiveRequest) -> None:
        if live.was_submitted:
            message = "the replica that ran the request was lost, and none came in its place"
            self.fail(live, ApiError("replica_lost", message))
        else:
            self.last_given_up = self._loop.time()
            self.fail(live, ApiError("no_replica", "no replica is ready to take the request"))

    def move(self, live: LiveRequest, reason: str) -> None:
        """Go on with a request whose replica was lost, unless it looks like the cause. reason: in words."""
        if live.log.error is not None or live.log.finished:
            return
        self._note(live, Wait.MIGRATION, reason)
        if live.strikes >= self._config.quarantine_deaths:
            told = live.request_id, live.strikes
            extra = about_request(live.request_id)
            logger.error("request %s is quarantined after %d replica deaths", *told, extra=extra)
            message = "replicas died each time they took up this request; it is not tried again"
            self.fail(live, ApiError("request_quarantined", message, retryable=False))
            return
        self._counters.migrations += 1
        if live.trace is not None:
            live.trace.moves(reason)
        self.place(live)

    def end(self, live: LiveRequest, why: str = "") -> None:
        """Let the request run and wait no more. why: as of `detach`."""
        self.withdraw(live, why)
        self._waiting_room.leave(live)

    def fail(self, live: LiveRequest, error: ApiError) -> None:
        """End the request with its one typed error."""
        error.request_id = live.request_id
        self.end(live, error.code)
        live.log.fail(error)

    def withdraw(self, live: LiveRequest, why: str = "") -> None:
        """End the attempt that runs, if any, here and on its replica. why: as of `detach`."""
        attempt = live.attempt
        if attempt is not None:
            self.send(attempt.member, Abort(attempt.stream))
            self.detach(live, why)

    def detach(self, live: LiveRequest, why: str = "") -> None:
        """Forget the attempt that runs, if any: it has ended on its replica, or with it.

        why: code of the error that ended it, for its trace; "" = it is complete.
        """
        attempt = live.attempt
        if attempt is None:
            return
        if live.trace is not None:
            live.trace.attempt_over(why)
        if attempt.member.detach(live, attempt):
            self.probe_ended()
        self.retire_if_idle(attempt.member)

    def probe_ended(self) -> None:
        """Give those that were kept away from a suspect's replica another try."""
        # Later, not now: whoever is moving requests about should finish first.
        self._loop.call_soon(self.place_waiting)

    def retire_if_idle(self, member: Member) -> None:
        """Let a draining replica go once nothing of ours runs there."""
        if member.draining and not member.live:
            self._fleet.lose(member, DRAINED, "the replica has finished what it ran")

    def send(self, member: Member, message: Up) -> None:
        """Tell a replica something about an attempt; a link that is over is left to its reader."""
        if not member.link.closed:
            try:
                member.link.send(message)
            except LinkClosedError as error:
                self._loop.call_soon(self._fleet.lose, member, error.code, error.message)
