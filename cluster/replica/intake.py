"""How a router's request becomes a run of the engine, and how it is taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster.replica.engine_thread import Engine
from cluster.replica.grammar_start import Grammars, GrammarStart
from cluster.replica.router_session import RouterSession, Run
from cluster.replica.runs import Runs
from cluster.telemetry.aside import Aside
from cluster.telemetry.steps import StepFigures
from cluster.wire.message_parts import MAX_NAME, FinishRow
from cluster.wire.messages import Rejected, Submit
from cluster.wire.translation import clipped, submitted_request
from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar
from engine.request import FinishReason, Request

if TYPE_CHECKING:
    from cluster.telemetry.tracing.engine_spans import EngineSpans


class Intake:
    """Hands requests to the engine, and enters them in `runs`. Used on one event loop.

    grammars: compiles what outputs must match, and is closed with this; None
    = such requests are refused. clock: the core's. spans: of attempts that routers trace; None = of none. aside: does
    what may fail without harm.
    """

    def __init__(
        self,
        engine: Engine,
        runs: Runs,
        figures: StepFigures,
        grammars: Grammars | None,
        clock: Callable[[], float],
        spans: EngineSpans | None,
        aside: Aside,
    ) -> None:
        self._engine = engine
        self._runs = runs
        self._figures = figures
        self._grammars = GrammarStart(grammars, self._on_compiled, self.rejected, engine.flight)
        self._clock = clock
        self._spans = spans
        self._aside = aside
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """End what compiles grammars."""
        await self._grammars.close()

    def grammar_seconds(self) -> dict[str, float]:
        """Return the seconds that the compiler of grammars spent on each tenant so far."""
        return self._grammars.spent()

    def submit(self, session: RouterSession, submit: Submit) -> None:
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
        self._aside.do(self._figures.submitted, request.resume is not None)
        if self._spans is not None and submit.trace is not None:
            self._aside.do(self._spans.begin, request, submit.trace, self._clock())
        if request.params.structured is None:
            self._engine.add(request)
        else:
            self._grammars.begin(request, request.params.structured)

    def refuse_broken(self, session: RouterSession, stream: int) -> None:
        """Refuse a submit that could not be read or handled; what was begun of it is taken back."""
        session.highest_stream = max(session.highest_stream, stream)
        self.abort(session.runs.get(stream))
        error = InvalidRequestError("the request could not be started", None, "internal_error")
        self._refuse(session, _rejection(stream, error))

    def break_off(self, run: Run) -> None:
        """End a run whose share of a step could not be put together, and tell its router with the same report."""
        for lane in run.lanes.values():
            message = "its tokens could not be told"
            run.session.finishes.append(FinishRow(lane.key, FinishReason.ERROR.value, lane.count, message))
        self.abort(run)

    def abort(self, run: Run | None) -> None:
        """End a run that its router wants no more, if there is one."""
        if run is None:
            return
        if self._grammars.give_up(run.engine_id):
            self._end_spans(run.engine_id, "cancelled")
        else:
            self._engine.abort(run.engine_id)
        self._runs.drop(run)

    def finish_choice(self, run: Run | None, choice: int) -> None:
        """End one choice of a run, if there is one; the others go on."""
        if run is None or choice not in run.lanes:
            return
        if len(run.lanes) == 1:
            self.abort(run)
            return
        self._engine.finish_choice(run.engine_id, choice)
        self._runs.drop_lane(run.lanes[choice])

    def rejected(self, request_id: str, error: InvalidRequestError) -> None:
        """Tell the one router that asked for it that a request cannot run."""
        self._end_spans(request_id, error.code)
        run = self._runs.get(request_id)
        if run is not None:
            self._runs.drop(run)
            self._refuse(run.session, _rejection(run.stream, error))

    def _on_compiled(self, request: Request, grammar: CompiledGrammar) -> None:
        now = self._clock()
        seconds = 0.0 if request.arrival_time is None else now - request.arrival_time
        self._aside.do(self._figures.compiled, seconds)
        if self._spans is not None:
            self._aside.do(self._spans.compiled, request.request_id, now)
        self._engine.add(request, grammar)

    def _end_spans(self, request_id: str, code: str) -> None:
        if self._spans is not None:
            self._aside.do(self._spans.refused, request_id, code, self._clock())

    def _refuse(self, session: RouterSession, rejection: Rejected) -> None:
        self._aside.do(self._figures.refused, rejection.code)
        session.send(rejection)


def _rejection(stream: int, error: InvalidRequestError) -> Rejected:
    param = None if error.param is None else clipped(error.param, MAX_NAME)
    return Rejected(stream, clipped(error.code, MAX_NAME), clipped(str(error)), param)
