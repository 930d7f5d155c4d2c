"""The router's token source: accepts requests, keeps their token logs, and streams their tokens over any replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from random import Random

from cluster.accounts.flight_recorder import FlightRecorder, Wait
from cluster.admission.capacity import QueueState, ReplicaCapacity, together
from cluster.admission.deadline import DeadlineTimers, deadline_exceeded
from cluster.errors import ApiError
from cluster.router.counters import DispatcherCounters
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.logprob_room import LogprobRoom
from cluster.router.placement import Placement
from cluster.router.prefix_index import CacheReports
from cluster.router.quarantine import Blame
from cluster.router.replica_handle import LiveRequest, ReplicaHandle
from cluster.router.replica_set import ReplicaEvents, ReplicaSet, ReplicaView
from cluster.router.reports import ReportReader
from cluster.router.token_log import TokenLog
from cluster.router.why import Explanation, Inquiries, explanation
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk
from cluster.wire.answer_messages import Deleted, Fetched, Followed, Orphaned, Superseded
from cluster.wire.codec import Down, Up
from cluster.wire.link import CLOSED, DAMAGED, ReplicaLink
from cluster.wire.replica_messages import Begun, Draining, Explained, Heartbeat, Rejected, Report
from cluster.wire.router_messages import FinishChoice, Ping
from cluster.wire.translation import waited
from engine.request import Request
from engine.sampling_params import MOST_LOGPROBS

CopyMessage = Fetched | Orphaned | Superseded | Followed | Deleted


class Dispatcher:
    """Implements `TokenSource` over any number of replicas. Made and used on one event loop.

    A request runs on one replica at a time. When that one is lost, the request is submitted to another together with
    its token log and goes on at the next position; later messages about the former attempt are dropped.

    The parts: `ReplicaSet` holds the links, `Placement` decides where each request runs or waits, `ReportReader`
    applies the replicas' reports. caches: what the replicas report of their prefix caches.
    """

    def __init__(self, config: DispatcherConfig | None = None, rng: Random | None = None) -> None:
        config, rng = config or DispatcherConfig(), rng or Random()
        self.counters = DispatcherCounters()
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, LiveRequest] = {}
        self._flight = FlightRecorder(self._loop.time)
        self._blame = Blame(config.quarantine_deaths, config.no_replica_timeout, self._loop.time)
        # The replica set calls nothing before the event loop runs, when all parts are made.
        events = ReplicaEvents(self._on_message, self._on_lost, self._on_room, self._on_overstay, self._ping)
        self._replicas = ReplicaSet(config, rng, self._blame, events)
        self.caches: CacheReports = self._replicas.caches
        self._placement = Placement(
            config, self._replicas, self.counters, self._flight, self._blame, rng, self._waits_for_replica
        )
        self._reports = ReportReader(
            self._live, self._replicas, self._placement, self._blame, self.counters, config.max_pending_tokens
        )
        self._inquiries = Inquiries(self._replicas.send)
        self._deadlines = DeadlineTimers(self._loop, self._expire)
        self._on_copies: Callable[[ReplicaHandle, CopyMessage], None] = lambda *_: None
        self._on_linked: Callable[[ReplicaHandle], None] = lambda _: None
        self._has_all_links: Callable[[], bool] = lambda: True
        self._reaches_all: Callable[[], bool] = lambda: True
        self._closing = False
        self._on_leaving: Callable[[str, bool], None] = lambda replica_id, _: self.remove_replica(replica_id)
        self._on_waiting: Callable[[], None] = lambda: None
        self._queue_before: Callable[[], QueueState] = QueueState
        self._logprobs = LogprobRoom()
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def ready(self) -> bool:
        """Whether some replica takes requests and reported progress lately."""
        return not self._closing and self._replicas.selection.has_ready()

    def room(self) -> ReplicaCapacity | None:
        """Return what the replicas hold that take requests, of those that move if any do; None without a replica."""
        return None if self._closing else self._replicas.selection.room()

    def has_replica(self) -> bool:
        """Whether some replica takes requests, be its steps as slow as they may."""
        return self.room() is not None

    def tokens_computed(self) -> int:
        """Return the tokens that replicas have brought or prefilled so far."""
        return self.counters.tokens + self.counters.prefilled

    @property
    def closing(self) -> bool:
        """Whether nothing new is taken."""
        return self._closing

    @property
    def given_up_ago(self) -> float:
        """Seconds since a new request was last refused because no replica came for it."""
        return self._placement.given_up_ago

    @property
    def num_waiting(self) -> int:
        """Requests that wait here for a replica."""
        return self._placement.queue().requests

    @property
    def num_live(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._live)

    @property
    def num_of_others(self) -> int:
        """Requests that the replicas have of others, as they last said."""
        return sum([replica.num_of_others for replica in self._replicas.linked])

    @property
    def fingerprint(self) -> str | None:
        """Of the model that the replicas run, where there is a replica and all run the same."""
        found = {replica.fingerprint for replica in self._replicas.linked}
        return found.pop() if len(found) == 1 else None

    def replicas(self) -> list[ReplicaView]:
        """Return a snapshot of the replicas and their load."""
        return self._replicas.views()

    def log_of(self, request_id: str) -> TokenLog | None:
        """Return the token log of a live request, to be looked at, not changed."""
        live = self._live.get(request_id)
        return None if live is None else live.log

    def watch_queue(self, figures: Callable[[], QueueState]) -> None:
        """Count what waits in front of this as waiting, too."""
        self._queue_before = figures

    def call_when_waiting(self, callback: Callable[[], None]) -> None:
        """Have `callback` called whenever a request has to wait for a replica."""
        self._on_waiting = callback

    def call_when_leaving(self, callback: Callable[[str, bool], None]) -> None:
        """Have `callback` called with the id of a replica that says it is to go, in the place of `remove_replica`.

        And with whether its node or process ends soon, so that it is of use until another is there, and no longer.
        """
        self._on_leaving = callback

    def turned_away(self, request: Request, waited: float, outcome: str) -> None:
        """Note that a request waited in front of this, `waited` seconds, and never came in."""
        self._note_turn(request, waited)
        self._flight.note(request.request_id, Wait.DONE, outcome)

    def turn_away(self, error: Callable[[], ApiError]) -> None:
        """End the requests that wait for a replica and have brought no token yet."""
        self._placement.turn_away(error)

    def end_all(self, error: Callable[[], ApiError]) -> None:
        """End all requests, each with an error of its own; new ones are taken."""
        for live in list(self._live.values()):
            if live.log.error is None and not live.log.finished:
                self._placement.fail(live, error())

    @property
    def linked(self) -> list[ReplicaHandle]:
        """The replicas whose links hold."""
        return self._replicas.linked

    def send(self, replica: ReplicaHandle, message: Up) -> None:
        """Send a message whose loss does no harm; see `ReplicaSet.send`."""
        self._replicas.send(replica, message)

    @property
    def has_all_links(self) -> bool:
        """Whether there is no replica, as far as is known, that may yet be linked."""
        return self._has_all_links()

    @property
    def reaches_all(self) -> bool:
        """Whether there is no replica that has no link now, be it one that cannot have any."""
        return self._reaches_all()

    def ask_for_links(self, has_all: Callable[[], bool], reaches_all: Callable[[], bool]) -> None:
        """Have `has_all` say whether all replicas that are there are linked, or cannot be.

        reaches_all: says whether all are but those that are to go, and give what they have to others.
        """
        self._has_all_links, self._reaches_all = has_all, reaches_all

    def hold_copies(
        self, on_message: Callable[[ReplicaHandle, CopyMessage], None], on_linked: Callable[[ReplicaHandle], None]
    ) -> None:
        """Have `on_message` called with what replicas say of copies of answers, and `on_linked` with new replicas."""
        self._on_copies, self._on_linked = on_message, on_linked

    async def explain(self, name: str, tenant: str | None = None) -> Explanation:
        """Return what this router and the replicas know of a request's waiting.

        name: as its client knows it. tenant: the request must be this tenant's; None = any.
        """
        now = self._loop.time()
        own = [waited(event, now) for event in self._flight.of(name, tenant)]
        return explanation(own, await self._inquiries.ask(self._replicas.linked, name, tenant))

    def add_link(self, link: ReplicaLink) -> None:
        """Use a replica from now on; a link to an earlier life of it is given up."""
        self._blame.is_alive(link.replica_id, link.incarnation)
        self._on_linked(self._replicas.add(link))
        self._placement.place_waiting()

    def remove_replica(self, replica_id: str) -> None:
        """Send nothing new to a replica and close its link once it has finished what it runs.

        What overstays there goes on elsewhere (`DispatcherConfig.hand_over_after`), at once where the replica said
        so. One that fell silent before, and was not found again, is taken for dead.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            self._replicas.has_left(replica_id)
            self._blame.has_gone(replica_id)
            self._placement.place_waiting()
            return
        replica.draining = True
        if replica.hands_over:
            self._placement.on_overstay(replica)
        self._replicas.retire_if_idle(replica)

    async def drain(self) -> None:
        """Accept no more requests and wait until all have ended."""
        self._closing = True
        await self._quiet.wait()

    async def close(self) -> None:
        """End every request with `shutting_down` and all links."""
        self._closing = True
        for live in list(self._live.values()):
            self._placement.fail(live, ApiError("shutting_down", "the server is shutting down"))
        await self._replicas.close(CLOSED)

    # --- the requests

    def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncGenerator[TokenChunk, None]:
        """Run `request` and yield its new tokens; see `TokenSource.generate`."""
        chunks = self._run(request, context)
        return self._in_room(request, chunks) if request.params.whole_rows else chunks

    async def _in_room(
        self, request: Request, chunks: AsyncGenerator[TokenChunk, None]
    ) -> AsyncGenerator[TokenChunk, None]:
        vocab_size = max([one.link.welcome.vocab_size for one in self._replicas.linked], default=MOST_LOGPROBS)
        async with self._logprobs.of(request, vocab_size), aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _run(self, request: Request, context: CallContext) -> AsyncGenerator[TokenChunk, None]:
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
            self._placement.end(live)
            live.log.wake()
        elif still_runs and attempt is not None:
            attempt.replica.streams.pop(attempt.stream + choice, None)
            self._replicas.send(attempt.replica, FinishChoice(attempt.stream, choice))

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
            self._placement.place(live)
        return live

    def _note_turn(self, request: Request, waited: float) -> None:
        began, detail = self._loop.time() - waited, f"of tenant {request.tenant}"
        self._flight.note(request.request_id, Wait.TURN, detail, began, request.tenant)

    def _expire(self, live: LiveRequest) -> None:
        self._placement.fail(live, deadline_exceeded())

    def _release(self, live: LiveRequest) -> None:
        """End the request for good: its consumer has left, served or not."""
        log = live.log
        self._placement.end(live, "" if log.finished else "cancelled")
        self._deadlines.forget(live)
        self._blame.forget(live)
        del self._live[live.request_id]
        outcome = "completed" if log.finished else "aborted"
        if log.error is not None:
            outcome = log.error.code
        elif log.finished:
            self._observe(live)
        self.counters.outcomes[outcome] += 1
        if live.request_id in self._flight:
            self._flight.note(live.request_id, Wait.DONE, outcome)
        if not self._live:
            self._quiet.set()
        live.end_trace()

    def _observe(self, live: LiveRequest) -> None:
        now = self._loop.time()
        self.counters.latency.observe(now - live.accepted_at)
        self.counters.device_seconds.observe(live.device_seconds)
        self.counters.block_seconds.observe(live.block_seconds)
        if live.first_token_at is not None and live.log.longest > 1:
            self.counters.tpot.observe((now - live.first_token_at) / (live.log.longest - 1))

    def queue(self) -> QueueState:
        """Return what waits, here for a replica and in front of this. Sent to replicas too."""
        return together([self._queue_before(), self._placement.queue()])

    def _waits_for_replica(self) -> None:
        self._on_waiting()

    # --- events of the replica set

    def _on_lost(self, replica: ReplicaHandle, code: str, message: str) -> None:
        self._placement.on_lost(replica, code, message)

    def _on_room(self) -> None:
        self._placement.place_waiting()

    def _on_overstay(self, replica: ReplicaHandle) -> None:
        self._placement.on_overstay(replica)

    def _ping(self) -> Ping:
        queue = self.queue()
        return Ping(queue.requests, queue.tokens, max(0.0, queue.age), queue.rate, self._placement.next_stream)

    def _on_message(self, replica: ReplicaHandle, message: Down) -> None:
        """Hand a replica's message to the part that acts on it."""
        match message:
            case Report():
                self._reports.on_report(replica, message)
            case Heartbeat():
                self._reports.on_heartbeat(replica, message)
            case Begun(streams=streams):
                replica.begun(streams)
            case Rejected():
                self._reports.on_rejected(replica, message)
            case Explained():
                self._inquiries.on_answer(replica, message)
            case Fetched() | Orphaned() | Superseded() | Followed() | Deleted():
                self._on_copies(replica, message)
            case Draining(hand_over=hand_over):
                replica.hands_over |= hand_over
                self._on_leaving(replica.replica_id, hand_over)
            case _:
                self._replicas.lose(replica, DAMAGED, f"a {type(message).__name__} is not expected here")
