"""A replica without Ray: takes routers' links, runs their requests on the engine, reports each step to each."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from cluster.cached_blocks import CachedBlocks
from cluster.engine_thread import Core, EngineThread
from cluster.link import CLOSED, DAMAGED, ENGINE_DEAD, SILENT, SUPERSEDED, LinkClosedError, RouterLink
from cluster.messages import (
    Abort,
    Draining,
    FinishChoice,
    FinishRow,
    Heartbeat,
    Load,
    Ping,
    Rejected,
    Submit,
    Up,
    Welcome,
    clipped,
    load_of,
    submitted_request,
)
from cluster.router_session import Lane, RouterSession, Run
from engine.errors import InvalidRequestError
from engine.report import EngineStats, Finish, StepReport
from engine.request import Request, Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica is and runs, as in `Welcome`. `num_kv_blocks` excludes the null block."""

    replica_id: str
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """Times in seconds.

    heartbeat: silence after which a router is told that all is well. router_timeout: silence of a router after
    which it is taken for dead and its requests are ended.
    """

    heartbeat: float = 0.5
    router_timeout: float = 10.0


class ReplicaCore:
    """Owns the engine thread; made and used on one event loop. `serve` is what a `LinkServer` awaits for each link.

    on_dead: called once with the reason when the engine cannot go on; the process should then end.
    incarnation: number of this life of the replica; random unless given.
    """

    def __init__(
        self,
        core: Core,
        facts: ReplicaFacts,
        times: ReplicaTimes | None = None,
        on_dead: Callable[[str], None] | None = None,
        incarnation: int | None = None,
    ) -> None:
        self.facts = facts
        self.incarnation = secrets.randbits(62) if incarnation is None else incarnation
        self.dead_reason: str | None = None
        self._times = times or ReplicaTimes()
        self._on_dead = on_dead
        self._loop = asyncio.get_running_loop()
        self._engine = EngineThread(core, self._loop, self)
        self._sessions: dict[str, RouterSession] = {}  # by router id
        self._runs: dict[str, Run] = {}  # by engine request id
        self._lanes: dict[Sequence, Lane] = {}  # of the sequences that reported a token
        self._cached = CachedBlocks()
        self._num_sessions = 0
        self._draining = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._engine.start()
        self._ticker = self._loop.create_task(self._tick())

    @property
    def stats(self) -> EngineStats:
        """The engine's latest figures."""
        return self._engine.stats

    @property
    def num_requests(self) -> int:
        """Requests that run or wait here."""
        return len(self._runs)

    def is_healthy(self, deadline: float) -> bool:
        """Whether the engine finished a step, or was seen idle and ready, within the last `deadline` seconds."""
        return self._engine.is_healthy(deadline)

    def drain(self) -> None:
        """Take nothing new and tell all routers so; what runs goes on."""
        self._draining = True
        for session in self._sessions.values():
            session.send(Draining(), self._loop.time())

    async def drained(self) -> None:
        """Wait until nothing runs here."""
        await self._quiet.wait()

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
        if not await self._loop.run_in_executor(None, self._engine.stop):
            logger.error("replica %s: the engine thread did not end", self.facts.replica_id)

    async def serve(self, link: RouterLink) -> None:
        """Serve one router until its link ends; its requests are ended with it."""
        if self.dead_reason is not None:
            link.close(ENGINE_DEAD, self.dead_reason)
            return
        session = self._begin_session(link)
        try:
            while True:
                message = await link.receive()
                session.last_heard = self._loop.time()
                self._handle(session, message)
        except LinkClosedError as error:
            logger.info("replica %s: router %s left: %s", self.facts.replica_id, link.router_id, error)
        finally:
            self._end_session(session, CLOSED, "the link is not served any more")

    def on_report(self, report: StepReport) -> None:
        """Send each router its share of one engine step."""
        now = self._loop.time()
        self._distribute(report)
        for finish in report.finished:
            self._finish(finish)
        blocks = self._cached.note(report.events)
        load = load_of(report.stats, 0.0)
        for session in self._sessions.values():
            if blocks is not None or session.has_rows:
                session.flush(report.step, load, now, blocks)

    def on_rejected(self, request_id: str, error: InvalidRequestError) -> None:
        """Tell the one router that asked."""
        run = self._runs.get(request_id)
        if run is not None:
            self._drop(run)
            self._reject(run.session, run.stream, error)

    def on_dead(self, reason: str) -> None:
        """End all links with the reason, so that the routers go elsewhere at once. Only the first call counts.

        Called by the engine thread's outcome, and by whoever else learns that the tensor-parallel group is gone.
        """
        if self.dead_reason is not None:
            return
        self.dead_reason = clipped(reason)
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
        session.send(self._welcome(), now)
        for changes in self._cached.snapshot():
            session.flush(0, self._load(), now, changes)
        return session

    def _end_session(self, session: RouterSession, code: str, message: str) -> None:
        session.link.close(code, message)
        for run in list(session.runs.values()):
            self._engine.abort(run.engine_id)
            self._drop(run)
        if self._sessions.get(session.link.router_id) is session:
            del self._sessions[session.link.router_id]

    def _handle(self, session: RouterSession, message: Up) -> None:
        match message:
            case Submit():
                self._submit(session, message)
            case Abort(stream=stream):
                self._abort(session.runs.get(stream))
            case FinishChoice(stream=stream, choice=choice):
                self._finish_choice(session.runs.get(stream), choice)
            case Ping():
                pass
            case _:
                session.link.close(DAMAGED, f"a {type(message).__name__} is not expected here")

    def _submit(self, session: RouterSession, submit: Submit) -> None:
        if submit.stream <= session.highest_stream:
            return  # said before: it runs, or has ended
        session.highest_stream = submit.stream
        if self._draining:
            refusal = Rejected(submit.stream, "draining", "this replica takes nothing new", elsewhere=True)
            session.send(refusal, self._loop.time())
            return
        engine_id = f"{submit.request_id}@{session.number}.{submit.stream}"
        try:
            request = submitted_request(submit, engine_id)
        except InvalidRequestError as error:
            self._reject(session, submit.stream, error)
            return
        self._start(session, submit.stream, request)

    def _start(self, session: RouterSession, stream: int, request: Request) -> None:
        run = Run(request.request_id, stream, session)
        logs = dict.fromkeys(range(request.params.n), ()) if request.resume is None else request.resume
        for choice, log in logs.items():
            run.lanes[choice] = Lane(run, session, stream + choice, choice, len(log))
        session.runs[stream] = run
        self._runs[run.engine_id] = run
        self._quiet.clear()
        self._engine.add(request)

    def _abort(self, run: Run | None) -> None:
        if run is not None:
            self._engine.abort(run.engine_id)
            self._drop(run)

    def _finish_choice(self, run: Run | None, choice: int) -> None:
        if run is None or choice not in run.lanes:
            return
        if len(run.lanes) == 1:
            self._abort(run)
            return
        self._engine.finish_choice(run.engine_id, choice)
        self._drop_lane(run.lanes[choice])

    def _reject(self, session: RouterSession, stream: int, error: InvalidRequestError) -> None:
        session.send(Rejected(stream, error.code, clipped(str(error)), error.param), self._loop.time())

    def _distribute(self, report: StepReport) -> None:
        lanes = self._lanes
        logprobs = report.logprobs
        for row, (sequence, token) in enumerate(zip(report.sequences, report.token_ids, strict=True)):
            lane = lanes.get(sequence) or self._lane(sequence)
            if lane is None:
                continue
            session = lane.session
            session.streams.append(lane.key)
            session.indices.append(lane.count)
            session.tokens.append(token)
            lane.count += 1
            if row in logprobs:
                session.add_logprobs(logprobs[row])

    def _lane(self, sequence: Sequence) -> Lane | None:
        """Return the lane of a sequence that is heard of for the first time; None if nobody wants it any more."""
        run = self._runs.get(sequence.request.request_id)
        lane = run.lanes.get(sequence.index) if run is not None else None
        if lane is not None:
            lane.sequence = sequence
            self._lanes[sequence] = lane
            if sequence.num_cached_tokens:
                lane.session.cached.append((lane.key, sequence.num_cached_tokens))
        return lane

    def _finish(self, finish: Finish) -> None:
        sequence = finish.sequence
        lane = self._lanes.get(sequence) or self._lane(sequence)
        if lane is None:
            return
        row = FinishRow(lane.key, finish.reason.value, sequence.num_output_tokens, clipped(finish.message))
        lane.session.finishes.append(row)
        self._drop_lane(lane)
        if not lane.run.lanes:
            self._drop(lane.run)

    def _drop_lane(self, lane: Lane) -> None:
        del lane.run.lanes[lane.choice]
        if lane.sequence is not None:
            del self._lanes[lane.sequence]

    def _drop(self, run: Run) -> None:
        for lane in list(run.lanes.values()):
            self._drop_lane(lane)
        run.session.runs.pop(run.stream, None)
        self._runs.pop(run.engine_id, None)
        if not self._runs:
            self._quiet.set()

    def _load(self) -> Load:
        return load_of(self._engine.stats, self._engine.progress_age)

    def _welcome(self) -> Welcome:
        facts = self.facts
        return Welcome(
            facts.replica_id,
            self.incarnation,
            facts.model,
            facts.max_model_len,
            facts.vocab_size,
            facts.block_size,
            facts.num_kv_blocks,
            facts.eos_token_ids,
            self._draining,
            facts.fingerprint,
        )

    async def _tick(self) -> None:
        expected = self._loop.time()
        while True:
            now = self._loop.time()
            if now - expected > self._times.heartbeat:
                # This process was stopped or starved: what the routers said meanwhile has not been read yet.
                for session in self._sessions.values():
                    session.last_heard = now
            for session in list(self._sessions.values()):
                self._attend(session, now)
            expected = now + self._times.heartbeat / 2
            await asyncio.sleep(self._times.heartbeat / 2)

    def _attend(self, session: RouterSession, now: float) -> None:
        if now - session.last_heard > self._times.router_timeout:
            self._end_session(session, SILENT, "the router has been silent for too long")
        elif now - session.last_sent >= self._times.heartbeat:
            session.send(Heartbeat(self.incarnation, self._load()), now)
