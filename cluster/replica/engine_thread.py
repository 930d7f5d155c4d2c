"""The one thread that owns the engine: commands go in between steps, step reports come out on the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from typing_extensions import override

from cluster.accounts.costs import EngineCosts, EngineUsage
from cluster.accounts.engine_accounts import EngineAccounts
from cluster.accounts.flight_recorder import FlightRecorder
from cluster.telemetry.logs import about_request
from engine.core import EngineCore
from engine.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    StepMemoryError,
    redacted,
)
from engine.grammar.base import CompiledGrammar
from engine.report import EngineStats, StepReport
from engine.request import Request, Sequence
from engine.worker.sleep import TAGS

logger = logging.getLogger(__name__)

IDLE_TICK = 0.5  # seconds: how often a parked thread shows that it is alive
COSTS_AGE = 0.5  # seconds: how often the accounts are looked at
BEGIN_WAIT = 0.05  # seconds that a step waits at most until it knows what it tries again
REST_SECONDS = 600.0  # that falling asleep or waking up may take: as long as reading a large model
MAX_UNDELIVERED = 256  # step reports that may wait for an event loop that is held up
Command = Callable[[], object]


class Rested(NamedTuple):
    """How the engine sleeps after an order: level, parts that sleep, those whose memory is free.

    failed: why the order could not be carried out, "" where it was.
    """

    level: int
    asleep: tuple[str, ...]
    released: tuple[str, ...]
    failed: str


OnRested = Callable[[Rested], object]


class EngineListener(Protocol):
    """Who hears of what the engine did. Called on the event loop."""

    def on_begin(self, request_ids: list[str]) -> None:
        """The step that is run now is the first that computes something for these requests."""

    def on_report(self, report: StepReport) -> None:
        """One step was run."""

    def on_rejected(self, request_id: str, error: InvalidRequestError) -> None:
        """The engine refused a request that was added."""

    def on_weights(self, fingerprint: str) -> None:
        """The engine woke up with other weights: what it reports from now on is another model's."""

    def on_dead(self, reason: str) -> None:
        """The engine cannot go on; nothing else will be reported. Called once."""


class Engine(ABC):
    """What runs the engine of a replica: an `EngineThread`, or a simulated one.

    Commands (`add`, `abort`, `finish_choice`) are carried out in order before the next step, so an aborted request's
    blocks are free within two steps. The listener hears of each outcome once, in order, on the event loop.
    """

    def __init__(self, core: EngineCore, loop: asyncio.AbstractEventLoop, listener: EngineListener) -> None:
        self._core = core
        self._loop = loop
        self._listener = listener
        self._commands: deque[Command] = deque()
        self._stats = core.stats()
        self._accounts = EngineAccounts(core.clock)
        core.call_on_event(self._accounts.note)
        core.call_on_begin(self._begin)

    @property
    def stats(self) -> EngineStats:
        """Figures after the latest step or command."""
        return self._stats

    @property
    def flight(self) -> FlightRecorder:
        """What requests had to wait for, also while a step hangs."""
        return self._accounts.flight

    def used(self, sequence: Sequence) -> EngineUsage:
        """Return what a sequence has used that has ended."""
        return self._accounts.used(sequence)

    @property
    @abstractmethod
    def costs(self) -> EngineCosts:
        """Who has used what, as of a moment ago."""

    @property
    @abstractmethod
    def progress_age(self) -> float:
        """Seconds since the engine last moved, or was seen idle and ready."""

    @abstractmethod
    def is_healthy(self, deadline: float) -> bool:
        """Whether the engine lives and moved within the last `deadline` seconds."""

    @abstractmethod
    def start(self) -> None:
        """Begin to run. Can be called once."""

    @abstractmethod
    def stop(self, timeout: float = 10.0) -> bool:
        """End and close the engine; return whether that was done within `timeout` seconds. From any thread."""

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        """Have the engine run `request`; `on_rejected` is called if it refuses."""
        self._command(lambda: self._add(request, grammar))

    def abort(self, request_id: str) -> None:
        """Have the engine end a request; unknown ids are passed over."""
        self._command(lambda: self._core.abort(request_id))

    def finish_choice(self, request_id: str, choice: int) -> None:
        """Have the engine end one choice of a request; unknown ones are passed over."""
        self._command(lambda: self._core.finish_choice(request_id, choice))

    def rest(self, level: int, asleep: tuple[str, ...], done: OnRested) -> None:
        """Have these parts of the engine (`engine.worker.sleep.TAGS`) sleep, at `level`, and all others be awake.

        done: called on the event loop with how it went; not where the engine died of it.
        """
        self._command(lambda: self._rest(level, asleep, done))

    @abstractmethod
    def _wake_up(self) -> None:
        """See to it that commands are carried out."""

    @abstractmethod
    def _publish(self, outcome: Command) -> None:
        """Call the listener on the event loop."""

    def _begin(self, requests: list[Request]) -> None:
        """Tell what the step at hand begins, before it is run."""
        request_ids = [request.request_id for request in requests]
        self._publish(lambda: self._listener.on_begin(request_ids))

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        self._wake_up()

    def _take_orders(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _rest(self, level: int, asleep: tuple[str, ...], done: OnRested) -> None:
        core, before, failed = self._core, self._core.fingerprint, ""
        try:
            if asleep and not core.is_sleeping:
                core.sleep(level)
            if core.is_sleeping:
                core.wake_up([tag for tag in TAGS if tag not in asleep])
        except (CheckpointError, ConfigError, StepMemoryError) as error:
            failed = str(error)
        if (fingerprint := core.fingerprint) != before:
            # Before any step's report: who hears of it lets go of what runs, so no answer is of two models.
            self._publish(lambda: self._listener.on_weights(fingerprint))
        rested = Rested(core.sleep_level, core.asleep, core.released, failed)
        self._publish(lambda: done(rested))

    def _add(self, request: Request, grammar: CompiledGrammar | None) -> None:
        try:
            self._core.add(request, grammar)
        except InvalidRequestError as error:
            refusal = error
        except EngineDeadError:
            raise
        except Exception as error:
            # One request's data must not end the others'.
            request_id, cause = request.request_id, redacted(error)
            extra = about_request(request_id)
            logger.error("request %s could not be added", request_id, exc_info=cause, extra=extra)
            refusal = InvalidRequestError("the request could not be started", None, "internal_error")
        else:
            return
        self._publish(lambda: self._listener.on_rejected(request.request_id, refusal))


EngineMaker = Callable[[EngineCore, asyncio.AbstractEventLoop, EngineListener], Engine]


class EngineThread(Engine):
    """Runs the engine while there is work and parks when there is none. Commands may come from any thread."""

    def __init__(self, core: EngineCore, loop: asyncio.AbstractEventLoop, listener: EngineListener) -> None:
        super().__init__(core, loop, listener)
        self._outcomes: deque[Command] = deque()
        self._delivery_due = False
        self._wake = threading.Event()
        self._delivered = threading.Event()
        self._stopping = False
        self._dead = False
        self._broken = False  # a report was lost on its way: nothing that follows is passed on
        self._costs = self._accounts.costs()
        self._costs_due = 0.0
        self._last_progress = time.monotonic()
        self._rests_since: float | None = None  # falls asleep or wakes up, which takes longer than any step
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    @override
    def costs(self) -> EngineCosts:
        """Accounts as of less than `COSTS_AGE` before the latest step or idle tick."""
        return self._costs

    @property
    @override
    def progress_age(self) -> float:
        """Seconds since the engine finished a step, or was seen idle and ready."""
        now, rests_since = time.monotonic(), self._rests_since
        if rests_since is not None:
            return max(0.0, now - rests_since - REST_SECONDS)
        return max(0.0, now - self._last_progress)

    @override
    def is_healthy(self, deadline: float) -> bool:
        """Whether the engine lives and moved within the last `deadline` seconds."""
        return not self._dead and self._thread.is_alive() and self.progress_age <= deadline

    @override
    def start(self) -> None:
        """Begin to run. Can be called once."""
        self._thread.start()

    @override
    def stop(self, timeout: float = 10.0) -> bool:
        """End the thread and close the engine; return whether that was done within `timeout` seconds."""
        self._stopping = True
        self._wake.set()
        self._delivered.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @override
    def _rest(self, level: int, asleep: tuple[str, ...], done: OnRested) -> None:
        self._rests_since = time.monotonic()
        try:
            super()._rest(level, asleep, done)
        finally:
            self._last_progress, self._rests_since = time.monotonic(), None

    @override
    def _wake_up(self) -> None:
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._cycle()
        except EngineDeadError as error:
            self._die(str(error))
        except Exception as error:
            # The state of an engine that failed in the middle of a step cannot be trusted.
            logger.exception("the engine failed")
            self._die(f"the engine failed: {type(error).__name__}: {error}")
        finally:
            self._dead = True
            self._core.close()

    def _cycle(self) -> None:
        self._take_orders()
        self._await_delivery()
        if self._core.has_unfinished:
            if self._core.is_sleeping:
                self._park()  # such a step computes nothing: it tells who has left, or was too late
            report = self._core.step()
            self._stats = report.stats
            self._publish(lambda: self._listener.on_report(report))
        else:
            self._stats = self._core.stats()
            self._park()
        self._last_progress = now = time.monotonic()
        if now >= self._costs_due:
            self._core.emit_time()
            self._costs, self._costs_due = self._accounts.costs(), now + COSTS_AGE

    def _park(self) -> None:
        # A command that came before `clear` is seen by the check after it; one that comes later sets the event.
        self._wake.clear()
        if not self._commands and not self._stopping:
            self._last_progress = time.monotonic()
            self._wake.wait(IDLE_TICK)

    def _await_delivery(self) -> None:
        # As in `_park`: a delivery before `clear` is seen by the check after it, a later one sets the event.
        while len(self._outcomes) >= MAX_UNDELIVERED and not self._stopping:
            self._delivered.clear()
            if len(self._outcomes) >= MAX_UNDELIVERED and not self._stopping:
                self._delivered.wait(IDLE_TICK)

    @override
    def _begin(self, requests: list[Request]) -> None:
        """Tell what the step at hand begins, before it is run.

        With a request that is tried again, until that is known: it may be what ends the process at once, and who sent
        it must know then that it had begun.
        """
        request_ids, told = [request.request_id for request in requests], threading.Event()

        def tell() -> None:
            self._listener.on_begin(request_ids)
            told.set()

        self._publish(tell)
        if any(request.retried for request in requests):
            told.wait(BEGIN_WAIT)

    def _die(self, reason: str) -> None:
        self._dead = True
        self._publish(lambda: self._listener.on_dead(reason))

    @override
    def _publish(self, outcome: Command) -> None:
        self._outcomes.append(outcome)
        if self._delivery_due:
            return
        self._delivery_due = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: no result can be delivered.
            logger.warning("the event loop is gone; the engine stops")
            self._stopping = True

    def _deliver(self) -> None:
        # Cleared first: an outcome that is added while this runs either is taken below or schedules another run.
        self._delivery_due = False
        try:
            while self._outcomes and not self._broken:
                self._outcomes.popleft()()
        except Exception as error:
            # Rows were lost, and what follows would stand at the wrong places: others must go on from what was sent.
            logger.exception("the engine's report could not be passed on")
            self._broken = self._stopping = True
            self._wake.set()
            self._listener.on_dead(f"a step's report could not be passed on: {type(error).__name__}: {error}")
        finally:
            self._delivered.set()
