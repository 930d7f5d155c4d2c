"""A replica without Ray: takes routers' links, runs their requests on the engine, reports each step to each."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.accounts.flight_recorder import FlightRecorder
from cluster.admission.capacity import QueueState, together
from cluster.replica.engine_thread import EngineMaker, EngineThread
from cluster.replica.grammar_start import Grammars, GrammarStart
from cluster.replica.sessions import CachedBlocks, Changes, RouterSession, Run, Runs
from cluster.telemetry.logs import BestEffort
from cluster.telemetry.step_metrics import StepMetrics, StepSpeed
from cluster.wire.link import CLOSED, DAMAGED, ENGINE_DEAD, SILENT, SUPERSEDED, LinkClosedError, RouterLink
from cluster.wire.messages import (
    MAX_NAME,
    Abort,
    Begun,
    Costs,
    DamagedSubmitError,
    Draining,
    Explain,
    Explained,
    FinishChoice,
    FinishRow,
    Load,
    Ping,
    Rejected,
    Resync,
    Submit,
    Up,
    Welcome,
)
from cluster.wire.translation import clipped, costs_of, load_of, submitted_request, waited
from engine.core import EngineCore
from engine.errors import InvalidRequestError, redacted
from engine.grammar.base import CompiledGrammar
from engine.report import EngineStats, StepReport
from engine.request import FinishReason, Request

if TYPE_CHECKING:
    from cluster.telemetry.tracing.engine_spans import EngineSpans

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica is and runs, as in `Welcome`. `num_kv_blocks` excludes the null block.

    token_budget: tokens that a step of its engine may compute.
    """

    replica_id: str
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    token_budget: int = 8192

    def welcome(self, incarnation: int, draining: bool) -> Welcome:
        """Return the first message to a router."""
        return Welcome(
            self.replica_id,
            incarnation,
            self.model,
            self.max_model_len,
            self.vocab_size,
            self.block_size,
            self.num_kv_blocks,
            self.eos_token_ids,
            draining,
            self.fingerprint,
        )


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """Times in seconds.

    heartbeat: how often a router is told that all is well, and what runs here for it. router_timeout: silence of a
    router after which it is taken for dead and its requests are ended. costs: between two looks of a router at the
    accounts.
    """

    heartbeat: float = 0.5
    router_timeout: float = 10.0
    costs: float = 1.0


class ReplicaCore:
    """Owns the engine thread; made and used on one event loop. `serve` is what a `LinkServer` awaits for each link.

    on_dead: called once with the reason when the engine cannot go on; the process should then end.
    incarnation: number of this life of the replica; random unless given.
    grammars: compiles what outputs must match, and is closed with this; None = such requests are refused.
    engine: makes what runs the core. clock: the core's. spans: of attempts that routers trace; None = of none.
    """

    def __init__(
        self,
        core: EngineCore,
        facts: ReplicaFacts,
        times: ReplicaTimes | None = None,
        on_dead: Callable[[str], None] | None = None,
        incarnation: int | None = None,
        grammars: Grammars | None = None,
        engine: EngineMaker = EngineThread,
        clock: Callable[[], float] = time.monotonic,
        spans: EngineSpans | None = None,
    ) -> None:
        self.facts = facts
        self.incarnation = secrets.randbits(62) if incarnation is None else incarnation
        self.dead_reason: str | None = None
        self._times = times or ReplicaTimes()
        self._on_dead = on_dead
        self._loop = asyncio.get_running_loop()
        self._engine = engine(core, self._loop, self)
        self.metrics = StepMetrics(facts.model, facts.token_budget)
        self._sessions: dict[str, RouterSession] = {}  # by router id
        self._runs = Runs(self._engine.used)
        self._cached = CachedBlocks()
        self._num_sessions = 0
        self._draining = False
        self._clock = clock
        self._spans = spans
        self._best_effort = BestEffort()
        self._grammars = GrammarStart(grammars, self._on_compiled, self.on_rejected, self._engine.flight)
        self._speed = StepSpeed()
        self._engine.start()
        self._ticker = self._loop.create_task(self._tick())

    @property
    def stats(self) -> EngineStats:
        """The engine's latest figures."""
        return self._engine.stats

    @property
    def costs(self) -> Costs:
        """Who has used what, as of a moment ago."""
        return costs_of(self._engine.costs, self._grammars.spent())

    @property
    def queue_age(self) -> float:
        """Seconds that the sequence which waits longest has waited."""
        since = self.stats.waits_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @property
    def num_unwanted(self) -> int:
        """Tokens that were dropped, since nobody wants them any more."""
        return self._runs.num_unwanted

    @property
    def flight(self) -> FlightRecorder:
        """What requests had to wait for."""
        return self._engine.flight

    @property
    def num_requests(self) -> int:
        """Requests that run or wait here."""
        return len(self._runs)

    @property
    def prefill_wait(self) -> float:
        """Seconds that the prompt tokens which wait here take to compute."""
        return self._speed.seconds_for(self.stats.outstanding_tokens)

    @property
    def queue(self) -> QueueState:
        """What waits in the routers."""
        return together(session.queue for session in self._sessions.values())

    def is_healthy(self, deadline: float) -> bool:
        """Whether the engine finished a step, or was seen idle and ready, within the last `deadline` seconds."""
        return self._engine.is_healthy(deadline)

    def drain(self) -> None:
        """Tell all routers, those that come later too, that this replica is to go. What runs goes on.

        What they send nonetheless is run: it was on its way, or they have nobody else who speaks their tokens.
        """
        self._draining = True
        logger.info("replica %s is to go: %d routers are told", self.facts.replica_id, len(self._sessions))
        for session in self._sessions.values():
            session.send(Draining())

    async def drained(self) -> None:
        """Wait until nothing runs here."""
        await self._runs.until_none()

    async def until_left(self, router_id: str, patience: float) -> None:
        """Return when the link that the router opens within `patience` seconds is over, or it opened none."""
        await asyncio.sleep(patience)
        session = self._sessions.get(router_id)
        if session is not None:
            await session.link.wait_closed()

    async def close(self) -> None:
        """End all links and the engine."""
        self._ticker.cancel()
        for session in list(self._sessions.values()):
            self._end_session(session, CLOSED, "the replica stops")
        await self._grammars.close()
        if not await self._loop.run_in_executor(None, self._engine.stop):
            logger.error("replica %s: the engine thread did not end", self.facts.replica_id)
        if self._spans is not None:
            self._best_effort.do(self._spans.abandon, CLOSED, self._clock())

    async def serve(self, link: RouterLink) -> None:
        """Serve one router until its link ends; its requests are ended with it."""
        if self.dead_reason is not None:
            link.close(ENGINE_DEAD, self.dead_reason)
            return
        session = self._begin_session(link)
        try:
            while True:
                await self._take(session)
        except LinkClosedError as error:
            logger.info("replica %s: router %s left: %s", self.facts.replica_id, link.router_id, error)
        finally:
            self._end_session(session, CLOSED, "the link is not served any more")

    def on_report(self, report: StepReport) -> None:
        """Send each router its share of one engine step."""
        now = self._loop.time()
        self._best_effort.do(self._speed.note, report.num_tokens, report.seconds)
        for run in self._runs.distribute(report):
            self._break_off(run)
        self._best_effort.do(self.metrics.note, report)
        blocks = self._best_effort.do(self._cached.note, report.events)
        load = load_of(report.stats, 0.0)
        for session in list(self._sessions.values()):
            if blocks is not None or session.has_rows:
                self._flush(session, report.step, load, now, blocks)
        if self._spans is not None:  # last: no token waits for that
            self._best_effort.do(self._spans.note, report, self._engine.flight)

    def on_begin(self, request_ids: list[str]) -> None:
        """Tell each router which of its attempts are computed from now on."""
        self._best_effort.do(self._report_begun, request_ids)

    def _report_begun(self, request_ids: list[str]) -> None:
        begun: dict[RouterSession, list[int]] = {}
        for run in filter(None, map(self._runs.get, request_ids)):
            begun.setdefault(run.session, []).append(run.stream)
        for session, streams in begun.items():
            session.send(Begun(streams))

    def on_rejected(self, request_id: str, error: InvalidRequestError) -> None:
        """Tell the one router that asked for it that a request cannot run."""
        self._end_spans(request_id, error.code)
        run = self._runs.get(request_id)
        if run is not None:
            self._runs.drop(run)
            self._refuse(run.session, _rejection(run.stream, error))

    def on_dead(self, reason: str) -> None:
        """End all links with the reason, so that the routers go elsewhere at once. Only the first call counts.

        Called by the engine thread's outcome, and by whoever else learns that the tensor-parallel group is gone.
        """
        if self.dead_reason is not None:
            return
        self.dead_reason = clipped(reason)
        if self._spans is not None:
            self._best_effort.do(self._spans.abandon, ENGINE_DEAD, self._clock())
        for session in list(self._sessions.values()):
            self._end_session(session, ENGINE_DEAD, self.dead_reason)
        if self._on_dead is not None:
            self._on_dead(reason)

    def _begin_session(self, link: RouterLink) -> RouterSession:
        former = self._sessions.get(link.router_id)
        if former is not None:
            self._end_session(former, SUPERSEDED, "the router opened a new link")
        self._num_sessions += 1
        now = self._loop.time()
        session = RouterSession(link, self._num_sessions, self.incarnation, now)
        self._sessions[link.router_id] = session
        session.send(self.facts.welcome(self.incarnation, self._draining))
        if len(self._cached):
            self._report_blocks(session, now)
        return session

    def _report_blocks(self, session: RouterSession, now: float) -> None:
        """Tell a router all that the prefix cache holds."""
        for changes in self._cached.snapshot():
            session.flush(0, self._load(), self._others(session), changes)

    def _end_session(self, session: RouterSession, code: str, message: str) -> None:
        session.link.close(code, message)
        for run in list(session.runs.values()):
            self._abort(run)
        if self._sessions.get(session.link.router_id) is session:
            del self._sessions[session.link.router_id]

    async def _take(self, session: RouterSession) -> None:
        """Act on a router's next message; one that cannot be acted on harms its own request alone."""
        try:
            message = await session.link.receive()
        except DamagedSubmitError as error:
            session.last_heard = self._loop.time()
            logger.error("replica %s: a Submit cannot be read", self.facts.replica_id, exc_info=redacted(error))
            self._refuse_broken(session, error.stream)
            return
        session.last_heard = self._loop.time()
        try:
            self._handle(session, message)
        except Exception as error:
            told = self.facts.replica_id, type(message).__name__, session.link.router_id
            cause = redacted(error)
            logger.error("replica %s: a %s of router %s could not be handled", *told, exc_info=cause)
            if isinstance(message, Submit):
                self._refuse_broken(session, message.stream)

    def _flush(self, session: RouterSession, step: int, load: Load, now: float, blocks: Changes | None) -> None:
        """Send a router its report; where that fails its link ends, since rows are lost."""
        try:
            session.flush(step, load, self._others(session), blocks, self._costs_for(session, now))
        except Exception as error:
            told = self.facts.replica_id, session.link.router_id
            logger.error("replica %s: no report can be sent to router %s", *told, exc_info=redacted(error))
            self._end_session(session, DAMAGED, "a report could not be sent")

    def _handle(self, session: RouterSession, message: Up) -> None:
        match message:
            case Submit():
                self._submit(session, message)
            case Abort(stream=stream):
                self._abort(session.runs.get(stream))
            case FinishChoice(stream=stream, choice=choice):
                self._finish_choice(session.runs.get(stream), choice)
            case Explain(ticket, name, tenant):
                flight, now = self._engine.flight, self._clock()
                events = [waited(event, now) for event in flight.of(name, tenant)]
                session.send(Explained(ticket, events))
            case Resync():
                self._report_blocks(session, self._loop.time())
            case Ping(requests, tokens, age, rate, submitted):
                session.queue = QueueState(requests, tokens, age, rate)
                session.highest_stream = max(session.highest_stream, submitted - 1)
            case _:
                session.link.close(DAMAGED, f"a {type(message).__name__} is not expected here")

    def _submit(self, session: RouterSession, submit: Submit) -> None:
        """Begin what a router asks for, or tell it why not."""
        if submit.stream <= session.highest_stream:
            return  # said before: it runs, or has ended
        session.highest_stream = submit.stream
        engine_id = f"{submit.request_id}@{session.number}.{submit.stream}"
        try:
            request = submitted_request(submit, engine_id, self._clock())
        except InvalidRequestError as error:
            self._refuse(session, _rejection(submit.stream, error))
            return
        for event in submit.story:
            at = self._clock() - event.age
            self._engine.flight.note(engine_id, event.what, event.detail, at, submit.tenant)
        self._runs.start(session, submit.stream, request)
        self._best_effort.do(self.metrics.submitted, request.resume is not None)
        if self._spans is not None and submit.trace is not None:
            self._best_effort.do(self._spans.begin, request, submit.trace, self._clock())
        if request.params.structured is None:
            self._engine.add(request)
        else:
            self._grammars.begin(request, request.params.structured)

    def _refuse_broken(self, session: RouterSession, stream: int) -> None:
        """Refuse a submit that could not be read or handled; what was begun of it is taken back."""
        session.highest_stream = max(session.highest_stream, stream)
        self._abort(session.runs.get(stream))
        error = InvalidRequestError("the request could not be started", None, "internal_error")
        self._refuse(session, _rejection(stream, error))

    def _break_off(self, run: Run) -> None:
        """End a run whose share of a step could not be put together, and tell its router with the same report."""
        for lane in run.lanes.values():
            message = "its tokens could not be told"
            run.session.finishes.append(FinishRow(lane.key, FinishReason.ERROR.value, lane.count, message))
        self._abort(run)

    def _abort(self, run: Run | None) -> None:
        """End a run that its router wants no more, if there is one."""
        if run is None:
            return
        if self._grammars.give_up(run.engine_id):
            self._end_spans(run.engine_id, "cancelled")
        else:
            self._engine.abort(run.engine_id)
        self._runs.drop(run)

    def _finish_choice(self, run: Run | None, choice: int) -> None:
        """End one choice of a run, if there is one; the others go on."""
        if run is None or choice not in run.lanes:
            return
        if len(run.lanes) == 1:
            self._abort(run)
            return
        self._engine.finish_choice(run.engine_id, choice)
        self._runs.drop_lane(run.lanes[choice])

    def _on_compiled(self, request: Request, grammar: CompiledGrammar) -> None:
        now = self._clock()
        seconds = 0.0 if request.arrival_time is None else now - request.arrival_time
        self._best_effort.do(self.metrics.compiled, seconds)
        if self._spans is not None:
            self._best_effort.do(self._spans.compiled, request.request_id, now)
        self._engine.add(request, grammar)

    def _end_spans(self, request_id: str, code: str) -> None:
        if self._spans is not None:
            self._best_effort.do(self._spans.refused, request_id, code, self._clock())

    def _refuse(self, session: RouterSession, rejection: Rejected) -> None:
        self._best_effort.do(self.metrics.refused, rejection.code)
        session.send(rejection)

    def _others(self, session: RouterSession) -> int:
        """Requests here that are not the router's own: known to this loop, not to the engine some steps later."""
        return len(self._runs) - len(session.runs)

    def _costs_for(self, session: RouterSession, now: float) -> Costs | None:
        """Return the accounts where it is time to tell them."""
        if now < session.costs_due:
            return None
        session.costs_due = now + self._times.costs
        return self.costs

    def _load(self) -> Load:
        return load_of(self._engine.stats, self._engine.progress_age)

    async def _tick(self) -> None:
        expected = self._loop.time()
        while True:
            now = self._loop.time()
            if now - expected > self._times.heartbeat:
                # This process was stopped or starved: what the routers said meanwhile has not been read yet.
                for session in self._sessions.values():
                    session.last_heard = now
            for session in list(self._sessions.values()):
                self._best_effort.do(self._attend, session, now)
            expected = now + self._times.heartbeat / 2
            await asyncio.sleep(self._times.heartbeat / 2)

    def _attend(self, session: RouterSession, now: float) -> None:
        if now - session.last_heard > self._times.router_timeout:
            self._end_session(session, SILENT, "the router has been silent for too long")
        elif now - session.last_beat >= self._times.heartbeat:
            session.beat(self._load(), now, self._others(session), self._costs_for(session, now))


def _rejection(stream: int, error: InvalidRequestError) -> Rejected:
    param = None if error.param is None else clipped(error.param, MAX_NAME)
    return Rejected(stream, clipped(error.code, MAX_NAME), clipped(str(error)), param)
