"""How a router's request becomes a run of the engine, and how it is taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster.engine_thread import Engine
from cluster.figures.steps import DRAINING, StepFigures
from cluster.grammar_start import Grammars, GrammarStart
from cluster.messages import Rejected, Submit
from cluster.router_session import RouterSession, Run
from cluster.runs import Runs
from cluster.translation import clipped, submitted_request
from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar
from engine.request import Request

if TYPE_CHECKING:
    from cluster.tracing.engine_spans import EngineSpans


class Intake:
    """Hands requests to the engine, and enters them in `runs`. Used on one event loop.

    draining: whether nothing new is taken. grammars: compiles what outputs must match, and is closed with this; None
    = such requests are refused. clock: the core's. spans: of attempts that routers trace; None = of none.
    """

    def __init__(
        self,
        engine: Engine,
        runs: Runs,
        figures: StepFigures,
        grammars: Grammars | None,
        clock: Callable[[], float],
        spans: EngineSpans | None,
    ) -> None:
        self.draining = False
        self._engine = engine
        self._runs = runs
        self._figures = figures
        self._grammars = GrammarStart(grammars, self._on_compiled, self.rejected, engine.flight)
        self._clock = clock
        self._spans = spans
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """End what compiles grammars."""
        await self._grammars.close()

    def submit(self, session: RouterSession, submit: Submit) -> None:
        """Begin what a router asks for, or tell it why not."""
        if submit.stream <= session.highest_stream:
            return  # said before: it runs, or has ended
        session.highest_stream = submit.stream
        if self.draining:
            self._refuse(session, Rejected(submit.stream, DRAINING, "this replica takes nothing new", elsewhere=True))
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
        self._figures.submitted(request.resume is not None)
        if self._spans is not None and submit.trace is not None:
            self._spans.begin(request, submit.trace, self._clock())
        if request.params.structured is None:
            self._engine.add(request)
        else:
            self._grammars.begin(request, request.params.structured)

    def abort(self, run: Run | None) -> None:
        """End a run that its router wants no more, if there is one."""
        if run is not None:
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
        if self._spans is not None:
            self._spans.refused(request_id, error.code, self._clock())
        run = self._runs.get(request_id)
        if run is not None:
            self._runs.drop(run)
            self._refuse(run.session, _rejection(run.stream, error))

    def _on_compiled(self, request: Request, grammar: CompiledGrammar) -> bool:
        now, wanted = self._clock(), self._runs.get(request.request_id) is not None
        if wanted:
            self._figures.compiled(0.0 if request.arrival_time is None else now - request.arrival_time)
            if self._spans is not None:
                self._spans.compiled(request.request_id, now)
            self._engine.add(request, grammar)
        elif self._spans is not None:
            self._spans.refused(request.request_id, "cancelled", now)
        return wanted

    def _refuse(self, session: RouterSession, rejection: Rejected) -> None:
        self._figures.refused(rejection.code)
        session.send(rejection, self._loop.time())


def _rejection(stream: int, error: InvalidRequestError) -> Rejected:
    return Rejected(stream, error.code, clipped(str(error)), error.param)
