"""A replica without Ray: takes routers' links, runs their requests on the engine, reports each step to each."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.accounts.flight_recorder import FlightRecorder
from cluster.admission.capacity import QueueState
from cluster.replica.answer_keeper import AnswerKeeper
from cluster.replica.engine_thread import EngineMaker, EngineThread
from cluster.replica.grammar_start import Grammars, GrammarStart
from cluster.replica.runs import RouterSession, Run, Runs
from cluster.replica.sessions import ReplicaFacts, ReplicaTimes, RouterSessions
from cluster.replica.sleeper import Sleeper
from cluster.sleep_orders import ASLEEP, SleepOrder
from cluster.telemetry.logs import BestEffort
from cluster.telemetry.step_metrics import ReplicaTelemetry, StepMetrics
from cluster.wire.answer_messages import Deleted, Disclaim, Fetch, Forget, Keep
from cluster.wire.codec import DamagedSubmitError, Up
from cluster.wire.link import CLOSED, DAMAGED, DRAINED, ENGINE_DEAD, LinkClosedError, RouterLink
from cluster.wire.parts import MAX_NAME, Load, ReplicaCosts
from cluster.wire.replica_messages import Begun, Explained, FinishRow, Rejected
from cluster.wire.router_messages import Abort, Explain, FinishChoice, Ping, Resync, Submit
from cluster.wire.translation import clipped, costs_of, load_of, submitted_request, waited
from engine.core import EngineCore
from engine.errors import InvalidRequestError, redacted
from engine.grammar.base import CompiledGrammar
from engine.report import EngineStats, StepReport
from engine.request import FinishReason, Request

if TYPE_CHECKING:
    from cluster.telemetry.tracing.engine_spans import EngineSpans

logger = logging.getLogger(__name__)


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
        self._on_dead = on_dead
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._engine = engine(core, self._loop, self)
        self.metrics = StepMetrics(facts.model, facts.token_budget, facts.replica_id)
        self._telemetry = ReplicaTelemetry(self.metrics, self._engine.flight, spans, clock)
        self._runs = Runs(self._engine.used)
        self._sessions = RouterSessions(
            facts, self.incarnation, times or ReplicaTimes(), self._load, lambda: self.costs, self._runs, self._abort
        )
        self._answers = AnswerKeeper(lambda: self._sessions.all)
        self._sleeper = Sleeper(self._engine, self.drained, self._sessions.tell_sleep)
        self._grammars = GrammarStart(grammars, self._on_compiled, self.on_rejected, self._engine.flight)
        self._best_effort = BestEffort()
        self._engine.start()

    @property
    def stats(self) -> EngineStats:
        """The engine's latest figures."""
        return self._engine.stats

    @property
    def costs(self) -> ReplicaCosts:
        """Who has used what, as of a moment ago."""
        return costs_of(self._engine.costs, self._grammars.spent(), self.metrics.told())

    @property
    def queue_age(self) -> float:
        """Seconds that the sequence which waits longest has waited."""
        since = self.stats.waits_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @property
    def num_unwanted(self) -> int:
        """Tokens that were dropped because their request had ended."""
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
        return self._telemetry.speed.seconds_for(self.stats.outstanding_tokens)

    @property
    def queue(self) -> QueueState:
        """What waits in the routers."""
        return self._sessions.queue

    def is_healthy(self, deadline: float) -> bool:
        """Whether the engine finished a step, or was seen idle and ready, within the last `deadline` seconds."""
        return self._engine.is_healthy(deadline)

    def drain(self, hand_over: bool = False) -> None:
        """Tell all routers, those that come later too, that this replica is to go. What runs goes on.

        What they send nonetheless is run: it was on its way, or no other replica has their vocabulary, or is there.
        hand_over: the routers are to go on elsewhere with what runs, at once.
        """
        what = "is to go, and hands over what it runs" if hand_over else "is to go"
        logger.info("replica %s %s: %d routers are told", self.facts.replica_id, what, len(self._sessions))
        self._sessions.drain(hand_over)

    async def drained(self) -> None:
        """Wait until nothing runs here."""
        await self._runs.until_none()

    def obey(self, order: SleepOrder) -> None:
        """Fall asleep or wake up, as ordered; where there is no order, nothing is said of sleep."""
        self._sleeper.obey(order)

    @property
    def sleep_level(self) -> int:
        """The level at which it sleeps, 0 while it is awake."""
        return self._sleeper.state.level

    async def until_left(self, router_id: str, patience: float) -> None:
        """Return when the link that the router opens within `patience` seconds is over, or it opened none."""
        await asyncio.sleep(patience)
        session = self._sessions.get(router_id)
        if session is not None:
            await session.link.wait_closed()

    async def close(self) -> None:
        """End all links and the engine."""
        self._sessions.close(CLOSED, "the replica stops")
        self._answers.close()
        self._sleeper.close()
        await self._grammars.close()
        if not await self._loop.run_in_executor(None, self._engine.stop):
            logger.error("replica %s: the engine thread did not end", self.facts.replica_id)
        self._telemetry.abandoned(CLOSED)

    async def serve(self, link: RouterLink) -> None:
        """Serve one router until its link ends; its requests are ended with it."""
        if self.dead_reason is not None:
            link.close(ENGINE_DEAD, self.dead_reason)
            return
        session = self._sessions.begin(link)
        self._answers.joined(session)
        drained = False
        try:
            while True:
                await self._take(session)
        except LinkClosedError as error:
            drained = error.code == DRAINED
            logger.info("replica %s: router %s left: %s", self.facts.replica_id, link.router_id, error)
        finally:
            self._sessions.end(session, CLOSED, "the link is not served any more")
            self._answers.left(session, drained)

    def on_report(self, report: StepReport) -> None:
        """Send each router its share of one engine step."""
        for run in self._runs.distribute(report):
            self._break_off(run)
        self._sessions.report(report, load_of(report.stats, 0.0))
        self._telemetry.step(report)

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
        self._telemetry.ended(request_id, error.code)
        run = self._runs.get(request_id)
        if run is not None:
            self._runs.drop(run)
            self._refuse(run.session, _rejection(run.stream, error))

    def on_weights(self, fingerprint: str) -> None:
        """Begin another life: what routers know of this one, and what runs here, is of the weights before."""
        logger.info("replica %s has other weights than before it slept: %s", self.facts.replica_id, fingerprint)
        self.facts = replace(self.facts, fingerprint=fingerprint)
        self.incarnation += 1
        self._sessions.begin_anew(self.facts, self.incarnation)

    def on_dead(self, reason: str) -> None:
        """End all links with the reason, so that the routers go elsewhere at once. Only the first call counts.

        Called by the engine thread, and by the watchers of the tensor-parallel group.
        """
        if self.dead_reason is not None:
            return
        self.dead_reason = clipped(reason)
        self._telemetry.abandoned(ENGINE_DEAD)
        self._sessions.end_all(ENGINE_DEAD, self.dead_reason)
        if self._on_dead is not None:
            self._on_dead(reason)

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
            case Keep() | Fetch() | Forget() | Disclaim() | Deleted():
                self._answers.take(session, message)
            case Resync():
                self._sessions.report_blocks(session)
            case Ping(requests, tokens, age, rate, submitted):
                session.queue = QueueState(requests, tokens, age, rate)
                session.highest_stream = max(session.highest_stream, submitted - 1)
            case _:
                session.link.close(DAMAGED, f"a {type(message).__name__} is not expected here")

    def _submit(self, session: RouterSession, submit: Submit) -> None:
        """Start a submitted request, or refuse it."""
        if submit.stream <= session.highest_stream:
            return  # said before: it runs, or has ended
        session.highest_stream = submit.stream
        if self._sleeper.is_asleep:
            self._refuse(session, Rejected(submit.stream, ASLEEP, "the replica sleeps"))
            return
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
        self._telemetry.submitted(request, submit.trace)
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
        """End a run whose share of a step could not be put together, and report that with the same step."""
        for lane in run.lanes.values():
            message = "its tokens could not be told"
            run.session.finishes.append(FinishRow(lane.key, FinishReason.ERROR.value, lane.count, message))
        self._abort(run)

    def _abort(self, run: Run | None) -> None:
        """End a run that its router wants no more, if there is one."""
        if run is None:
            return
        if self._grammars.give_up(run.engine_id):
            self._telemetry.ended(run.engine_id, "cancelled")
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
        self._telemetry.compiled(request)
        self._engine.add(request, grammar)

    def _refuse(self, session: RouterSession, rejection: Rejected) -> None:
        self._telemetry.refused(rejection.code)
        session.send(rejection)

    def _load(self) -> Load:
        return load_of(self._engine.stats, self._engine.progress_age)


def _rejection(stream: int, error: InvalidRequestError) -> Rejected:
    param = None if error.param is None else clipped(error.param, MAX_NAME)
    return Rejected(stream, clipped(error.code, MAX_NAME), clipped(str(error)), param)
