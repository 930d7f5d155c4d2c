"""The router's heart: it remembers every live request and sees it through, whatever becomes of the replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from random import Random

from cluster.admission.deadline import DeadlineTimers, deadline_exceeded
from cluster.admission.figures import QueueFigures, together
from cluster.admission.room import ReplicaRoom
from cluster.errors import ApiError
from cluster.router.attempts import Attempts
from cluster.router.blame import Blame
from cluster.router.counters import DispatcherCounters
from cluster.router.dispatch_config import DispatcherConfig
from cluster.router.fleet import Fleet, ReplicaView
from cluster.router.inquiries import Explanation, Inquiries, explanation
from cluster.router.member import LiveRequest, Member
from cluster.router.progress import Progress
from cluster.router.routing.cache_reports import CacheReports
from cluster.router.token_log import TokenLog
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk
from cluster.wire.link import CLOSED, DAMAGED, DETOURS, ReplicaLink
from cluster.wire.messages import Begun, Down, Draining, Explained, FinishChoice, Heartbeat, Rejected, Report
from cluster.wire.translation import waited
from engine.request import Request
from engine.telemetry.flight import FlightRecorder, Wait

logger = logging.getLogger(__name__)
UNLIKELY = 0.25  # suspicion of a request that waited while its replica broke a link off


class Dispatcher:
    """Implements `TokenSource` over any number of replicas. Made and used on one event loop.

    A request runs on one replica at a time. When that one is lost, the request is submitted to another together with
    its token log and goes on at the next position; nothing that the former one still says of it is believed.

    on_link_lost: called with the replica's id and the code of the link's end, to look for a new link.
    """

    def __init__(
        self,
        config: DispatcherConfig | None = None,
        rng: Random | None = None,
        on_link_lost: Callable[[str, str], None] | None = None,
    ) -> None:
        self.counters = DispatcherCounters()
        self._config = config or DispatcherConfig()
        self._on_link_lost = on_link_lost
        self._loop = asyncio.get_running_loop()
        rng = rng or Random()
        self._blame = Blame(self._config.quarantine_deaths, self._config.no_replica_timeout, self._loop.time)
        self._fleet = Fleet(self._config, self, rng, self._blame)
        self._live: dict[str, LiveRequest] = {}
        self._flight = FlightRecorder(self._loop.time)
        self._attempts = Attempts(self._config, self._fleet, self.counters, self._flight, self._blame, rng)
        self._progress = Progress(
            self._live,
            self._fleet,
            self._attempts,
            self.counters,
            self._blame,
            self._config.max_pending_tokens,
            self._loop.time,
        )
        self._inquiries = Inquiries(self._attempts.send)
        self._deadlines = DeadlineTimers(self._loop, self._expire)
        self._closing = False
        self._on_leaving: Callable[[str], None] = self.remove_replica
        self._queue_before: Callable[[], QueueFigures] = QueueFigures
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def ready(self) -> bool:
        """Whether some replica takes requests and reported progress lately."""
        return not self._closing and self._fleet.pool.has_ready()

    @property
    def has_replica(self) -> bool:
        """Whether some replica takes requests, be its steps as slow as they may."""
        return self.room() is not None

    def room(self) -> ReplicaRoom | None:
        """Return what the replicas hold that take requests, of those that move if any do; None without a replica."""
        return None if self._closing else self._fleet.pool.room()

    @property
    def caches(self) -> CacheReports:
        """What the replicas tell of their prefix caches."""
        return self._fleet.caches

    @property
    def closing(self) -> bool:
        """Whether nothing new is taken."""
        return self._closing

    @property
    def given_up_ago(self) -> float:
        """Seconds since a new request was last refused because no replica came for it."""
        return self._loop.time() - self._attempts.last_given_up

    def watch_queue(self, figures: Callable[[], QueueFigures]) -> None:
        """Count what waits in front of this as waiting, too."""
        self._queue_before = figures

    def call_when_waiting(self, callback: Callable[[], None]) -> None:
        """Have `callback` called whenever a request has to wait for a replica."""
        self._attempts.on_waiting = callback

    def call_when_leaving(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called with the id of a replica that says it is to go, in the place of `remove_replica`."""
        self._on_leaving = callback

    def queue(self) -> QueueFigures:
        """Return what waits, here for a replica and in front of this; replicas are told."""
        return together([self._queue_before(), self._attempts.queue()])

    def submitted(self) -> int:
        """Return the stream key that no submit so far has reached; replicas are told."""
        return self._attempts.next_stream

    @property
    def num_waiting(self) -> int:
        """Requests that wait here for a replica."""
        return self._attempts.queue().requests

    @property
    def num_live(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._live)

    @property
    def fingerprint(self) -> str | None:
        """Of the model that the replicas run, where there is a replica and all run the same."""
        found = {member.fingerprint for member in self._fleet.members}
        return found.pop() if len(found) == 1 else None

    def turned_away(self, request: Request, waited: float, outcome: str) -> None:
        """Note that a request waited in front of this, `waited` seconds, and never came in."""
        self._note_turn(request, waited)
        self._flight.note(request.request_id, Wait.DONE, outcome)

    async def explain(self, name: str, tenant: str | None = None) -> Explanation:
        """Return what this router and the replicas know of a request's waiting.

        name: as its client knows it. tenant: whose it must be, None = anybody's.
        """
        now = self._loop.time()
        own = [waited(event, now) for event in self._flight.of(name, tenant)]
        return explanation(own, await self._inquiries.ask(self._fleet.members, name, tenant))

    def log_of(self, request_id: str) -> TokenLog | None:
        """Return the token log of a live request, to be looked at, not changed."""
        live = self._live.get(request_id)
        return None if live is None else live.log

    @property
    def num_of_others(self) -> int:
        """Requests that the replicas have of others, as they last said."""
        return sum([member.num_of_others for member in self._fleet.members])

    def replicas(self) -> list[ReplicaView]:
        """Return a snapshot of the replicas and their load."""
        return self._fleet.views()

    def add_link(self, link: ReplicaLink) -> None:
        """Use a replica from now on; a link to an earlier life of it is given up."""
        self._blame.is_alive(link.incarnation)
        self._fleet.add(link)
        self._attempts.place_waiting()

    def remove_replica(self, replica_id: str) -> None:
        """Send nothing new to a replica and close its link once it has finished what it runs.

        What overstays there goes on elsewhere (`DispatcherConfig.hand_over_after`). One that fell silent before, and
        was not found again, is taken for dead.
        """
        member = self._fleet.get(replica_id)
        if member is None:
            self._fleet.has_left(replica_id)
            self._blame.has_gone(replica_id)
            self._attempts.place_waiting()
            return
        member.draining = True
        self._attempts.retire_if_idle(member)

    async def drain(self) -> None:
        """Accept no more requests and wait until all have ended."""
        self._closing = True
        await self._quiet.wait()

    async def close(self) -> None:
        """End every request with `shutting_down` and all links."""
        self._closing = True
        for live in list(self._live.values()):
            self._attempts.fail(live, ApiError("shutting_down", "the server is shutting down"))
        await self._fleet.close(CLOSED)

    async def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Run `request` and yield its new tokens; see `TokenSource.generate`."""
        live = self._accept(request, context)
        log = live.log
        try:
            while True:
                if not log.news:
                    await log.next_news(self._loop)
                for chunk in log.take():
                    yield chunk
                if log.error is not None:
                    raise log.error
                if log.finished and not log.news:
                    return
        finally:
            self._release(live)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice; the last one ends the request. Unknown ones are passed over."""
        live = self._live.get(request_id)
        log = live.log.choices.get(choice) if live is not None else None
        if live is None or log is None:
            return
        still_runs = log.finish_reason is None
        log.discard()
        attempt = live.attempt
        if live.log.finished:
            self._attempts.end(live)
            live.log.wake()
        elif still_runs and attempt is not None:
            attempt.member.streams.pop(attempt.stream + choice, None)
            self._attempts.send(attempt.member, FinishChoice(attempt.stream, choice))

    def on_message(self, member: Member, message: Down) -> None:
        """Act on what a replica said (called by the fleet)."""
        match message:
            case Report():
                self._progress.on_report(member, message)
            case Heartbeat(incarnation=incarnation):
                if incarnation == member.incarnation:
                    self._progress.on_heartbeat(member, message)
                    self._fleet.note_heartbeat(member, message)
            case Begun(streams=streams):
                self._progress.on_begun(member, streams)
            case Rejected():
                self._progress.on_rejected(member, message)
            case Explained():
                self._inquiries.on_answer(member, message)
            case Draining():
                self._on_leaving(member.replica_id)
            case _:
                self._fleet.lose(member, DAMAGED, f"a {type(message).__name__} is not expected here")

    def on_lost(self, member: Member, code: str, message: str) -> None:
        """Move what ran on a lost replica elsewhere (called by the fleet)."""
        stranded = list(member.live.values())
        logger.info("replica %s is lost with %d requests: %s: %s", member.replica_id, len(stranded), code, message)
        self.counters.links_lost[code] += 1
        self._blame.link_ended(member, code)
        queued = {live for live in stranded if live.attempt is not None and not live.attempt.begun}
        for live in stranded:
            self._attempts.detach(live, code)
        reason = f"replica {member.replica_id} is lost: {code}"
        for live in stranded:
            if code in DETOURS:
                self._attempts.redirect(live, reason, UNLIKELY if live in queued else 1.0)
            else:
                self._attempts.move(live, reason)
        if self._on_link_lost is not None:
            self._loop.call_soon(self._on_link_lost, member.replica_id, code)

    def on_room(self) -> None:
        """Go on with what waited (called by the fleet)."""
        self._attempts.place_waiting()

    def on_overstay(self, member: Member) -> None:
        """Go on elsewhere with what still runs on a draining replica, where that can be (called by the fleet)."""
        for live in list(member.live.values()):
            if self._fleet.pool.has_successor(live):
                self._attempts.withdraw(live, "draining")
                self._attempts.move(live, f"replica {member.replica_id} is to go")

    def _accept(self, request: Request, context: CallContext) -> LiveRequest:
        if self._closing:
            raise ApiError("shutting_down", "the server is shutting down", request_id=request.request_id)
        if request.request_id in self._live:
            message = "the request id is in use"
            raise ApiError("duplicate_request", message, status=409, request_id=request.request_id)
        if request.deadline is not None and request.deadline <= self._loop.time():
            raise deadline_exceeded("the request's deadline passed before it could start")
        live = LiveRequest(TokenLog(request, context.fingerprint), self._loop.time(), context)
        self._deadlines.watch(live, live.log.request.deadline)
        self._live[request.request_id] = live
        self._quiet.clear()
        self.counters.accepted += 1
        self.counters.prompt_tokens += len(request.prompt_token_ids)
        if context.waited:
            self._note_turn(request, context.waited)
            self._flight.note(request.request_id, Wait.LET_IN)
        if live.log.finished:
            live.log.wake()
        else:
            self._attempts.place(live)
        return live

    def _note_turn(self, request: Request, waited: float) -> None:
        began, detail = self._loop.time() - waited, f"of tenant {request.tenant}"
        self._flight.note(request.request_id, Wait.TURN, detail, began, request.tenant)

    def _release(self, live: LiveRequest) -> None:
        """End the request for good: its consumer has left, served or not."""
        self._attempts.end(live, "" if live.log.finished else "cancelled")
        self._deadlines.forget(live)
        self._blame.forget(live)
        del self._live[live.request_id]
        outcome = "completed" if live.log.finished else "aborted"
        if live.log.error is not None:
            outcome = live.log.error.code
        elif live.log.finished:
            self._observe(live)
        self.counters.outcomes[outcome] += 1
        if live.request_id in self._flight:
            self._flight.note(live.request_id, Wait.DONE, outcome)
        if not self._live:
            self._quiet.set()
        if live.trace is not None:
            live.trace.end(live)

    def _expire(self, live: LiveRequest) -> None:
        self._attempts.fail(live, deadline_exceeded())

    def _observe(self, live: LiveRequest) -> None:
        now = self._loop.time()
        self.counters.latency.observe(now - live.accepted_at)
        self.counters.device_seconds.observe(live.device_seconds)
        self.counters.block_seconds.observe(live.block_seconds)
        if live.first_token_at is not None and live.log.longest > 1:
            self.counters.tpot.observe((now - live.first_token_at) / (live.log.longest - 1))
