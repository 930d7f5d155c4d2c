"""The engine's place in a replica, on the event loop instead of a thread: steps take the time that a formula says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cluster.replica.engine_thread import Core, EngineListener
from engine.errors import InvalidRequestError
from engine.grammar.base import CompiledGrammar
from engine.report import EngineStats, StepReport
from engine.request import Request
from engine.telemetry.flight import FlightRecorder
from engine.telemetry.ledger import Costs

Command = Callable[[], object]


class SimulatedEngine:
    """Implements `Engine`. Commands are carried out between steps; a step's report comes when its time is over.

    step_seconds: how long the core's latest step takes, on the clock of the event loop, virtual or not. To the core
    it takes no time, so that all of its device seconds are idle.
    """

    def __init__(
        self,
        core: Core,
        loop: asyncio.AbstractEventLoop,
        listener: EngineListener,
        step_seconds: Callable[[], float],
    ) -> None:
        self._core = core
        self._loop = loop
        self._listener = listener
        self._step_seconds = step_seconds
        self._commands: deque[Command] = deque()
        self._stats = core.stats()
        self._last_progress = loop.time()
        self._busy = False
        self._stopped = False
        core.call_on_begin(lambda begun: listener.on_begin([request.request_id for request in begun]))

    @property
    def stats(self) -> EngineStats:
        """Figures after the latest step."""
        return self._stats

    @property
    def costs(self) -> Costs:
        """The accounts now."""
        return self._core.costs()

    @property
    def flight(self) -> FlightRecorder:
        """What requests had to wait for."""
        return self._core.flight

    @property
    def progress_age(self) -> float:
        """Seconds since the engine finished a step; 0 while it has nothing to do."""
        return self._loop.time() - self._last_progress if self._busy else 0.0

    def is_healthy(self, deadline: float) -> bool:
        """Whether it moved within the last `deadline` seconds."""
        return not self._stopped and self.progress_age <= deadline

    def start(self) -> None:
        """Nothing to begin: the first command does."""

    def stop(self, timeout: float = 10.0) -> bool:
        """End it."""
        self._stopped = True
        self._core.close()
        return True

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        """Have the engine run `request`; the listener hears if it is refused."""
        self._command(lambda: self._add(request, grammar))

    def abort(self, request_id: str) -> None:
        """Have the engine end a request; unknown ids are passed over."""
        self._command(lambda: self._core.abort(request_id))

    def finish_choice(self, request_id: str, choice: int) -> None:
        """Have the engine end one choice; unknown ones are passed over."""
        self._command(lambda: self._core.finish_choice(request_id, choice))

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        if not self._busy:
            self._busy = True
            self._last_progress = self._loop.time()
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Start a step, if there is anything to do."""
        if self._stopped:
            return
        while self._commands:
            self._commands.popleft()()
        if self._core.has_unfinished:
            report = self._core.step()
            report.seconds = seconds = self._step_seconds() if report.num_tokens else 0.0
            self._loop.call_later(seconds, self._end, report)
        else:
            self._stats = self._core.stats()
            self._busy = False

    def _end(self, report: StepReport) -> None:
        if self._stopped:
            return
        self._last_progress = self._loop.time()
        self._stats = report.stats
        self._listener.on_report(report)
        self._begin()

    def _add(self, request: Request, grammar: CompiledGrammar | None) -> None:
        try:
            self._core.add(request, grammar)
        except InvalidRequestError as error:
            self._listener.on_rejected(request.request_id, error)
