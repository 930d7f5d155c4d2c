"""The requests that run on a replica, by router: each step's rows are put into the reports of the routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cluster.accounts.costs import EngineUsage
from cluster.admission.capacity import QueueState
from cluster.telemetry.logs import about_request
from cluster.wire.codec import Down
from cluster.wire.link import LinkClosedError, RouterLink
from cluster.wire.parts import Load, ReplicaCosts, SleepState
from cluster.wire.replica_messages import BlockUpdate, FinishRow, Heartbeat, LogprobRow, PooledRow, PromptRow, Report
from cluster.wire.translation import clipped, pooled_row, prompt_row, usage_of
from engine.errors import redacted
from engine.report import Finish, Floats, PromptLogprobs, StepReport, TokenLogprob
from engine.request import Request, Sequence

logger = logging.getLogger(__name__)
Changes = tuple[list[int], list[int], bool]  # (stored, removed, cleared), as in `BlockUpdate`


@dataclass(eq=False, slots=True)
class Run:
    """One attempt to run a request. `lanes`: choice -> its lane, those that have not ended."""

    engine_id: str
    stream: int
    session: RouterSession
    lanes: dict[int, Lane] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Lane:
    """One choice of a run: where its tokens go. `count`: output tokens reported, those of the resume log included."""

    run: Run
    session: RouterSession
    key: int
    choice: int
    count: int
    sequence: Sequence | None = None


class RouterSession:
    """One router's share of a replica. The column lists are filled by the replica and emptied by `flush`.

    num_block_updates: changes of the prefix cache that were sent. highest_stream: of the submits that came, or can
    come no more.
    """

    def __init__(self, link: RouterLink, number: int, incarnation: int, now: float) -> None:
        self.link = link
        self.number = number
        self.runs: dict[int, Run] = {}
        self.highest_stream = -1
        self.last_heard = now
        self.last_beat = now
        self.costs_due = now
        self.queue = QueueState()  # what waits in the router
        self.streams: list[int] = []
        self.indices: list[int] = []
        self.tokens: list[int] = []
        self.finishes: list[FinishRow] = []
        self.logprobs: list[LogprobRow] = []
        self.cached: list[tuple[int, int]] = []
        self.prompts: list[PromptRow] = []
        self.pooled: list[PooledRow] = []
        self._incarnation = incarnation
        self._num_reports = 0
        self.num_block_updates = 0

    @property
    def has_rows(self) -> bool:
        """Whether the present step brought anything for this router."""
        return bool(self.streams or self.finishes or self.prompts)

    def add_logprobs(self, entry: TokenLogprob) -> None:
        """Give the row that was added last its log-probabilities."""
        ids = [token_id for token_id, _ in entry.top]
        values = [value for _, value in entry.top]
        self.logprobs.append(LogprobRow(len(self.streams) - 1, entry.logprob, ids, values))

    def flush(
        self,
        step: int,
        load: Load,
        others: int,
        blocks: Changes | None = None,
        costs: ReplicaCosts | None = None,
    ) -> None:
        """Send what was gathered as one report.

        others: requests of other routers here. blocks: (stored, removed, cleared) of the prefix cache.
        """
        update = None
        if blocks is not None:
            update = BlockUpdate(self.num_block_updates, *blocks)
            self.num_block_updates += 1
        report = Report(
            self._num_reports,
            self._incarnation,
            step,
            self.streams,
            self.indices,
            self.tokens,
            load,
            self.finishes,
            self.logprobs,
            self.cached,
            update,
            self.prompts,
            self.pooled,
            others,
            costs,
        )
        self._num_reports += 1
        self.streams, self.indices, self.tokens = [], [], []
        self.finishes, self.logprobs, self.cached = [], [], []
        self.prompts, self.pooled = [], []
        self.send(report)

    def beat(
        self,
        load: Load,
        now: float,
        others: int,
        costs: ReplicaCosts | None = None,
        sleep: SleepState | None = None,
    ) -> None:
        """Say that all is well, and what runs here for this router. Arguments as of `flush` and `Heartbeat`."""
        self.last_beat = now
        running = [lane.key for run in self.runs.values() for lane in run.lanes.values()]
        updates, submitted = self.num_block_updates, self.highest_stream + 1
        self.send(Heartbeat(self._incarnation, load, updates, others, costs, submitted, running, sleep))

    def send(self, message: Down) -> None:
        """Send `message`. On a link that is over nothing is sent: the task that reads the link handles its end."""
        if not self.link.closed:
            try:
                self.link.send(message)
            except LinkClosedError:
                return


class Runs:
    """The requests that run on a replica and have not ended, over all routers. Used on one event loop.

    used: says what a sequence has used that has ended. num_unwanted: tokens that came for requests which
        were dropped before.
    """

    def __init__(self, used: Callable[[Sequence], EngineUsage]) -> None:
        self.num_unwanted = 0
        self._used = used
        self._by_id: dict[str, Run] = {}  # by engine request id
        self._lanes: dict[Sequence, Lane] = {}  # of the sequences that reported a token
        self._quiet = asyncio.Event()
        self._quiet.set()

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, engine_id: str) -> Run | None:
        """Return a run by the id that the engine knows it by."""
        return self._by_id.get(engine_id)

    async def until_none(self) -> None:
        """Wait until nothing runs."""
        await self._quiet.wait()

    def start(self, session: RouterSession, stream: int, request: Request) -> None:
        """Enter a request that the engine is about to get under its id."""
        run = Run(request.request_id, stream, session)
        logs = dict.fromkeys(range(request.params.n), ()) if request.resume is None else request.resume
        for choice, log in logs.items():
            run.lanes[choice] = Lane(run, session, stream + choice, choice, len(log))
        session.runs[stream] = run
        self._by_id[run.engine_id] = run
        self._quiet.clear()

    def distribute(self, report: StepReport) -> list[Run]:
        """Put one step's rows and ends into the reports of the routers that asked for them.

        Returns the runs that this failed for, which must be broken off: some of their rows are missing.
        """
        lanes = self._lanes
        logprobs = report.logprobs
        broken: dict[Sequence, Exception] = {}
        for row, (sequence, token) in enumerate(zip(report.sequences, report.token_ids, strict=True)):
            lane = lanes.get(sequence) or self._lane(sequence)
            if lane is None:
                self.num_unwanted += 1
                continue
            session = lane.session
            session.streams.append(lane.key)
            session.indices.append(lane.count)
            session.tokens.append(token)
            lane.count += 1
            if row in logprobs:
                try:
                    session.add_logprobs(logprobs[row])
                except Exception as error:
                    broken[sequence] = error
                    for column in (session.streams, session.indices, session.tokens):
                        column.pop()
        if report.finished or report.prompt_logprobs or report.pooled:
            self._distribute_rest(report, broken)
        return self._runs_of(broken)

    def _distribute_rest(self, report: StepReport, broken: dict[Sequence, Exception]) -> None:
        """Put in what does not come with each token. broken: gains the sequences that this fails for."""
        tell: list[tuple[Sequence, Callable[[], None]]] = [
            *[(one.sequence, partial(self._add_prompt_logprobs, one)) for one in report.prompt_logprobs],
            *[(sequence, partial(self._add_pooled, sequence, state)) for sequence, state in report.pooled],
            *[(finish.sequence, partial(self._finish, finish)) for finish in report.finished],
        ]
        for sequence, told in tell:
            if sequence not in broken:
                try:
                    told()
                except Exception as error:
                    broken[sequence] = error

    def _runs_of(self, broken: dict[Sequence, Exception]) -> list[Run]:
        runs: dict[str, Run] = {}
        for sequence, error in broken.items():
            engine_id = sequence.request.request_id
            cause, extra = redacted(error), about_request(engine_id)
            logger.error("request %s: its share of a step cannot be told", engine_id, exc_info=cause, extra=extra)
            if (run := self._by_id.get(engine_id)) is not None:
                runs[engine_id] = run
        return list(runs.values())

    def _add_prompt_logprobs(self, told: PromptLogprobs) -> None:
        if (lane := self._lanes.get(told.sequence) or self._lane(told.sequence)) is not None:
            lane.session.prompts.append(prompt_row(lane.key, told))

    def _add_pooled(self, sequence: Sequence, state: Floats) -> None:
        if (lane := self._lanes.get(sequence) or self._lane(sequence)) is not None:
            lane.session.pooled.append(pooled_row(lane.key, state))

    def drop_lane(self, lane: Lane) -> None:
        """Forget one choice; its run goes on with the others."""
        del lane.run.lanes[lane.choice]
        if lane.sequence is not None:
            del self._lanes[lane.sequence]

    def drop(self, run: Run) -> None:
        """Forget a run: what the engine still reports of it is dropped."""
        for lane in list(run.lanes.values()):
            self.drop_lane(lane)
        run.session.runs.pop(run.stream, None)
        self._by_id.pop(run.engine_id, None)
        if not self._by_id:
            self._quiet.set()

    def _lane(self, sequence: Sequence) -> Lane | None:
        """Return the lane of a sequence that reports for the first time; None if its run was dropped."""
        run = self._by_id.get(sequence.request.request_id)
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
        row = FinishRow(
            lane.key,
            finish.reason.value,
            sequence.num_output_tokens,
            clipped(finish.message),
            finish.code,
            usage_of(self._used(sequence)),
        )
        lane.session.finishes.append(row)
        self.drop_lane(lane)
        if not lane.run.lanes:
            self.drop(lane.run)
