"""Where each live request runs, and how long it waits for a replica: attempts to run it begin, end and move.

Waiting and attempts share one file: every end of an attempt may let a waiting request in, or make its own wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

from cluster.accounts.flight_recorder import FlightRecorder, Wait
from cluster.admission.capacity import QueueState
from cluster.errors import ApiError
from cluster.router.counters import DispatcherCounters
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.quarantine import Blame
from cluster.router.replica_handle import LiveRequest, ReplicaHandle
from cluster.router.replica_set import ReplicaSet
from cluster.telemetry.logs import about_request
from cluster.wire.link import DETOURS, LinkClosedError, MessageTooLargeError
from cluster.wire.router_messages import Abort
from cluster.wire.translation import submit_message
from engine.errors import redacted
from engine.sampling_params import MAX_N

logger = logging.getLogger(__name__)

MAX_DETOURS = 8  # moves of a request in a row that replicas in good health gave the reason for
LOOK_AGAIN = 5.0  # seconds after which it is looked anew for a replica, whatever happened or did not
UNLIKELY = 0.25  # suspicion of a request that waited while its replica broke a link off
REST = 0.4  # seconds at most before each of them but the first


class WaitingRequests:
    """In order of arrival. `give_up` is called for a request whose time is over; it is still here then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, give_up: Callable[[LiveRequest], None]) -> None:
        self._loop = loop
        self._give_up = give_up
        self._timers: dict[LiveRequest, asyncio.TimerHandle] = {}
        self._since: dict[LiveRequest, float] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def enter(self, live: LiveRequest, seconds: float) -> None:
        """Let a request wait; one that waits already keeps its place and its time."""
        if live not in self._timers:
            self._since[live] = self._loop.time()
            self.stay(live, seconds)

    def stay(self, live: LiveRequest, seconds: float) -> None:
        """Let a request that waits do so for `seconds` from now, in its place."""
        if live in self._timers:
            self._timers[live].cancel()
        self._timers[live] = self._loop.call_later(seconds, self._give_up, live)

    def since(self, live: LiveRequest) -> float:
        """Return when a request that waits began to."""
        return self._since[live]

    def holds(self, live: LiveRequest) -> bool:
        """Whether a request waits here."""
        return live in self._timers

    def leave(self, live: LiveRequest) -> None:
        """Let a request go, if it is here."""
        self._since.pop(live, None)
        timer = self._timers.pop(live, None)
        if timer is not None:
            timer.cancel()

    def waiting(self) -> list[LiveRequest]:
        """Return those that wait, the first one first."""
        return list(self._timers)


class Placement:
    """A request has one attempt at a time, or waits for a replica, or has ended. Used on one event loop.

    on_waiting: called when a request has to wait for a replica.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        replicas: ReplicaSet,
        counters: DispatcherCounters,
        flight: FlightRecorder,
        blame: Blame,
        rng: Random,
        on_waiting: Callable[[], None],
    ) -> None:
        self._on_waiting = on_waiting
        self._config = config
        self._blame = blame
        self._rng = rng
        self._flight = flight
        self._replicas = replicas
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._waiting = WaitingRequests(self._loop, self._give_up)
        self._resting = WaitingRequests(self._loop, self._rested)  # before they are moved again
        self._retries = False  # in a moment
        self._next_stream = 0
        self._last_given_up = float("-inf")

    @property
    def next_stream(self) -> int:
        """Key of the next attempt's first stream."""
        return self._next_stream

    @property
    def given_up_ago(self) -> float:
        """Seconds since a new request was last refused because no replica came for it."""
        return self._loop.time() - self._last_given_up

    def place(self, live: LiveRequest, num_waiting: int = 0) -> None:
        """Submit the request to the replica that suits it best, or let it wait for one; not if it kills them.

        num_waiting: of how many that wait it is one; 0 = it has not waited.
        """
        try:
            if self._blame.is_guilty(live):
                self._quarantine(live)
            while live.log.error is None:
                replica = self._replicas.selection.choose(live, num_waiting)
                if replica is None:
                    self._park(live)
                    return
                if self._submit(live, replica):
                    return
        except Exception as error:
            # One request's data must not end the others', which may stand in line behind it to be moved.
            cause, extra = redacted(error), about_request(live.request_id)
            logger.error("request %s could not be placed", live.request_id, exc_info=cause, extra=extra)
            self.fail(live, ApiError("internal_error", "the request could not be started"))

    def _submit(self, live: LiveRequest, replica: ReplicaHandle) -> bool:
        """Return False if the replica turned out to be gone."""
        log, again = live.log, live.was_submitted
        stream = self._next_stream
        self._next_stream += MAX_N
        try:
            resume = log.resume() if again else None
            story, now = self._flight.story(live.request_id), self._loop.time()
            trace = live.begin_attempt_trace(replica.replica_id)
            message = submit_message(log.request, stream, resume, log.num_scored, now, story, trace, again)
            replica.link.send(message)
        except MessageTooLargeError as error:
            self.fail(live, ApiError("body_too_large", str(error), param="prompt"))
        except OverflowError as error:
            self.fail(live, ApiError("invalid_request", f"the request cannot be sent: {error}", param="prompt"))
        except LinkClosedError:
            return False  # the link's reader task gives it up
        else:
            self._waiting.leave(live)
            if story:
                self._note(live, Wait.SENT, f"to replica {replica.replica_id}")
            if live.computed_by not in (None, replica.computed_by):
                self._parts(live, replica)
            replica.attach(live, stream)
            if live.trace is not None:
                live.trace.sent()
            if self._blame.is_suspect(live):
                replica.probes.add(live)
        return True

    def _parts(self, live: LiveRequest, replica: ReplicaHandle) -> None:
        """Log that a stream goes on where its tokens are rounded otherwise, as `stream_migration` allows."""
        told = f"replica {replica.replica_id} may round otherwise: the rest may differ from what would have come"
        logger.warning("request %s: %s", live.request_id, told, extra=about_request(live.request_id))
        self._note(live, Wait.MIGRATION, told)

    def _park(self, live: LiveRequest) -> None:
        if self._replicas.selection.model_changed(live):
            message = (
                "the replicas that are left run another model than the one that began the answer, or compute it "
                "otherwise; sent again, the request starts anew there"
            )
            self.fail(live, ApiError("model_changed", message))
            return
        if not self._waiting.holds(live):
            self._note(live, Wait.REPLICA, "none takes it now")
        self._waiting.enter(live, min(LOOK_AGAIN, self._patience(live)))
        if live.trace is not None:
            live.trace.waits()
        self._on_waiting()

    def _note(self, live: LiveRequest, what: Wait, detail: str) -> None:
        self._flight.note(live.request_id, what, detail, tenant=live.log.request.tenant)

    def _patience(self, live: LiveRequest) -> float:
        """Seconds that a request may wait for a replica."""
        if live.was_submitted:
            return self._config.no_replica_timeout
        patience = live.context.patience
        return self._config.admission_wait if patience is None else patience

    def queue(self) -> QueueState:
        """Return what waits for a replica."""
        lives = self._waiting.waiting() + self._resting.waiting()
        age = self._loop.time() - min((live.accepted_at for live in lives), default=self._loop.time())
        return QueueState(len(lives), sum(len(live.log.request.prompt_token_ids) for live in lives), age)

    def place_waiting(self) -> None:
        """Try again for all that wait, the first one first."""
        self._retries = False
        waiting = self._waiting.waiting()
        in_vain: set[tuple[str | None, bool]] = set()
        for number, live in enumerate(waiting):
            kind = live.log.fingerprint, live.was_submitted
            if kind in in_vain:
                continue  # as it was for one like it, a moment ago
            self.place(live, len(waiting) - number)
            if self._waiting.holds(live) and not self._blame.is_suspect(live):
                in_vain.add(kind)

    def _time_left(self, live: LiveRequest) -> float:
        """Return the seconds that a request may still wait. While there is a replica for it, none of them pass."""
        now, patience = self._loop.time(), self._patience(live)
        if self._replicas.selection.has_taker(live):
            return patience
        since = max(self._waiting.since(live), self._replicas.served_until)
        return max(since + patience, self._replicas.selection.silent_until(live)) - now

    def _give_up(self, live: LiveRequest) -> None:
        left = self._time_left(live)
        if left > 0:
            self._waiting.stay(live, min(LOOK_AGAIN, left))
            self.place(live, len(self._waiting))
        elif live.was_submitted:
            message = "the replica that ran the request was lost, and none came in its place"
            self.fail(live, ApiError("replica_lost", message))
        else:
            self._last_given_up = self._loop.time()
            self.fail(live, ApiError("no_replica", "no replica is ready to take the request"))

    def turn_away(self, error: Callable[[], ApiError]) -> None:
        """End those that wait for a replica and have brought no token."""
        for live in self._waiting.waiting() + self._resting.waiting():
            if not live.log.longest:
                self.fail(live, error())

    def move(self, live: LiveRequest, reason: str, rest: float = 0.0) -> None:
        """Go on with a request whose replica was lost. reason: in words. rest: seconds that it waits before."""
        if live.log.error is not None or live.log.finished:
            return
        self._note(live, Wait.MIGRATION, reason)
        if self._blame.is_guilty(live):
            self._quarantine(live)
            return
        self._counters.migrations += 1
        if live.trace is not None:
            live.trace.moves(reason)
        if rest:
            self._resting.enter(live, rest)
        else:
            self.place(live)

    def redirect(self, live: LiveRequest, reason: str, suspicion: float = 1.0) -> None:
        """Move a request that its replica, in good health, no longer runs; at once the first time, then after a rest.

        Rests differ, so that the same ones do not meet again in the same step. After `MAX_DETOURS` in a row without
        a token it fails: whatever the cause, it would go round for ever.
        suspicion: how far the request may be the cause, 0 to 1; so much of a detour is counted.
        """
        rest = self._rng.uniform(0.0, REST) if live.detours else 0.0
        live.detours += suspicion
        if live.detours > MAX_DETOURS and not live.log.finished:
            told, extra = (live.request_id, reason), about_request(live.request_id)
            logger.error("request %s was moved too often in vain, the last time since %s", *told, extra=extra)
            self._note(live, Wait.MIGRATION, reason)
            message = "attempts to run the request were broken off, one after the other; it is not tried again"
            self.fail(live, ApiError("replica_lost", message))
        else:
            self.move(live, reason, rest)

    def _rested(self, live: LiveRequest) -> None:
        self._resting.leave(live)
        self.place(live)

    def _quarantine(self, live: LiveRequest) -> None:
        told, extra = (live.request_id, self._blame.deaths(live)), about_request(live.request_id)
        logger.error("request %s is quarantined after %d replica deaths", *told, extra=extra)
        message = "replicas died each time they took up this request; it is not tried again"
        self.fail(live, ApiError("request_quarantined", message, retryable=False))

    def on_lost(self, replica: ReplicaHandle, code: str, message: str) -> None:
        """Move what ran on a lost replica elsewhere."""
        stranded = list(replica.live.values())
        logger.info("replica %s is lost with %d requests: %s: %s", replica.replica_id, len(stranded), code, message)
        self._counters.links_lost[code] += 1
        self._blame.link_ended(replica, code)
        queued = {live for live in stranded if live.attempt is not None and not live.attempt.begun}
        for live in stranded:
            self.detach(live, code)
        reason = f"replica {replica.replica_id} is lost: {code}"
        for live in stranded:
            if code in DETOURS:
                self.redirect(live, reason, UNLIKELY if live in queued else 1.0)
            else:
                self.move(live, reason)

    def on_overstay(self, replica: ReplicaHandle) -> None:
        """Go on elsewhere with what still runs on a draining replica, where that can be."""
        for live in list(replica.live.values()):
            if self._replicas.selection.has_successor(live):
                self.withdraw(live, "draining")
                self.move(live, f"replica {replica.replica_id} is to go")

    def end(self, live: LiveRequest, why: str = "") -> None:
        """Let the request run and wait no more. why: as of `detach`."""
        self.withdraw(live, why)
        self._waiting.leave(live)
        self._resting.leave(live)
        live.context.on_end()

    def fail(self, live: LiveRequest, error: ApiError) -> None:
        """End the request with its one typed error."""
        error.request_id = live.request_id
        self.end(live, error.code)
        live.log.fail(error)

    def withdraw(self, live: LiveRequest, why: str = "") -> None:
        """End the attempt that runs, if any, here and on its replica. why: as of `detach`."""
        attempt = live.attempt
        if attempt is not None:
            self._replicas.send(attempt.replica, Abort(attempt.stream))
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
        if attempt.replica.detach(live, attempt) or self._replicas.selection.shares_out:
            self.has_room()
        self._replicas.retire_if_idle(attempt.replica)

    def has_room(self) -> None:
        """Give those that wait another try: a replica has computed what it was spared for."""
        if len(self._waiting) and not self._retries:
            self._retries = True
            # Later, not now: the caller may be in the middle of moving requests.
            self._loop.call_soon(self.place_waiting)
