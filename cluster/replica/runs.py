"""The requests that run on a replica: which router asked for each, and to whom a sequence reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from cluster.replica.router_session import Lane, RouterSession, Run
from cluster.telemetry.log_lines import about_request
from cluster.wire.message_parts import FinishRow
from cluster.wire.translation import clipped, pooled_row, prompt_row, usage_of
from engine.report import Finish, Floats, PromptLogprobs, StepReport
from engine.request import Request, Sequence
from engine.telemetry.wordless import wordless

logger = logging.getLogger(__name__)


class Runs:
    """Those that have not ended, over all routers. Used on one event loop.

    num_unwanted: tokens of those that were dropped before, for which nobody was left.
    """

    def __init__(self) -> None:
        self.num_unwanted = 0
        self._by_id: dict[str, Run] = {}  # by engine request id
        self._lanes: dict[Sequence, Lane] = {}  # of the sequences that reported a token
        self._quiet = asyncio.Event()
        self._quiet.set()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_lanes(self) -> int:
        """Choices that have reported a token and have not ended."""
        return len(self._lanes)

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
        """Put in what is not told for each token. broken: gains the sequences that this fails for."""
        tell: list[tuple[Sequence, Callable[[], None]]] = [
            *[(one.sequence, partial(self._tell_prompt, one)) for one in report.prompt_logprobs],
            *[(sequence, partial(self._tell_pooled, sequence, state)) for sequence, state in report.pooled],
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
            cause, extra = wordless(error), about_request(engine_id)
            logger.error("request %s: its share of a step cannot be told", engine_id, exc_info=cause, extra=extra)
            if (run := self._by_id.get(engine_id)) is not None:
                runs[engine_id] = run
        return list(runs.values())

    def _tell_prompt(self, told: PromptLogprobs) -> None:
        if (lane := self._lanes.get(told.sequence) or self._lane(told.sequence)) is not None:
            lane.session.prompts.append(prompt_row(lane.key, told))

    def _tell_pooled(self, sequence: Sequence, state: Floats) -> None:
        if (lane := self._lanes.get(sequence) or self._lane(sequence)) is not None:
            lane.session.pooled.append(pooled_row(lane.key, state))

    def drop_lane(self, lane: Lane) -> None:
        """Forget one choice; its run goes on with the others."""
        del lane.run.lanes[lane.choice]
        if lane.sequence is not None:
            del self._lanes[lane.sequence]

    def drop(self, run: Run) -> None:
        """Forget a run: what the engine still says of it is nobody's."""
        for lane in list(run.lanes.values()):
            self.drop_lane(lane)
        run.session.runs.pop(run.stream, None)
        self._by_id.pop(run.engine_id, None)
        if not self._by_id:
            self._quiet.set()

    def _lane(self, sequence: Sequence) -> Lane | None:
        """Return the lane of a sequence that is heard of for the first time; None if nobody wants it any more."""
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
            usage_of(sequence.device_ns, sequence.block_ns),
        )
        lane.session.finishes.append(row)
        self.drop_lane(lane)
        if not lane.run.lanes:
            self.drop(lane.run)
