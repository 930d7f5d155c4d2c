"""The thread that steps an engine: faults of one request, deaths of the engine, reports that nobody takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from cluster.replica.engine_thread import MAX_UNDELIVERED, EngineThread
from engine.errors import EngineDeadError, InvalidRequestError
from engine.events import Began, OnEvent
from engine.grammar.base import CompiledGrammar
from engine.kv.block_manager import NO_EVENTS
from engine.report import EngineStats, StepReport
from engine.request import Request
from tests.cluster.cluster_lab import until
from tests.engine.engine_driver import long_request


class BrittleCore:
    """An engine that fails as told."""

    def __init__(self, on_add: Exception | None = None, on_step: Exception | None = None) -> None:
        self.on_add, self.on_step = on_add, on_step
        self.work = False
        self.closed = threading.Event()

    def call_on_begin(self, told: Callable[[list[Request]], None]) -> None:
        self.begin = told

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        if self.on_add is not None:
            raise self.on_add
        self.work = True

    def abort(self, request_id: str) -> bool:
        return False

    def finish_choice(self, request_id: str, choice: int) -> bool:
        return False

    def step(self) -> StepReport:
        raise self.on_step or AssertionError("nothing to do")

    def stats(self) -> EngineStats:
        return EngineStats()

    clock = staticmethod(time.monotonic)

    def call_on_event(self, told: OnEvent) -> None:
        told(Began(time.monotonic(), 1, 1))

    def emit_time(self) -> None:
        pass

    @property
    def has_unfinished(self) -> bool:
        return self.work

    @property
    def is_sleeping(self) -> bool:
        return False

    def close(self) -> None:
        self.closed.set()


class Notes:
    """Takes down what the engine thread tells."""

    def __init__(self) -> None:
        self.rejected: list[tuple[str, InvalidRequestError]] = []
        self.dead: list[str] = []
        self.begun: list[str] = []
        self.news = asyncio.Event()

    def on_begin(self, request_ids: list[str]) -> None:
        self.begun += request_ids

    def on_report(self, report: StepReport) -> None:
        raise AssertionError("no step succeeds here")

    def on_rejected(self, request_id: str, error: InvalidRequestError) -> None:
        self.rejected.append((request_id, error))
        self.news.set()

    def on_dead(self, reason: str) -> None:
        self.dead.append(reason)
        self.news.set()


async def test_fault_in_adding_one_request_is_that_requests_own():
    core, notes = BrittleCore(on_add=KeyError("a secret")), Notes()
    thread = EngineThread(core, asyncio.get_running_loop(), notes)
    thread.start()
    thread.add(long_request("r"))
    await asyncio.wait_for(notes.news.wait(), 5)
    assert [(name, error.code) for name, error in notes.rejected] == [("r", "internal_error")]
    assert "secret" not in str(notes.rejected[0][1])
    assert thread.is_healthy(5.0)
    assert thread.stop()
    assert core.closed.is_set()
    assert not thread.is_healthy(5.0)


class DeadlyCore(BrittleCore):
    """An engine whose step ends the process: nothing is told that was not told before. Keeps what was."""

    def __init__(self, listener: Notes) -> None:
        super().__init__()
        self.listener = listener
        self.told: list[str] | None = None

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self.asked, self.work = request, True

    def step(self) -> StepReport:
        self.begin([self.asked])
        self.told = list(self.listener.begun)
        raise EngineDeadError("as if the process had ended")


async def test_a_step_waits_until_it_is_told_that_it_begins_what_is_tried_again():
    notes = Notes()
    core = DeadlyCore(notes)
    thread = EngineThread(core, asyncio.get_running_loop(), notes)
    thread.start()
    thread.add(replace(long_request("r"), retried=True))
    await asyncio.wait_for(notes.news.wait(), 5)
    assert core.told == ["r"]
    assert thread.stop()


async def test_unexpected_fault_in_a_step_ends_the_engine_with_a_reason():
    core, notes = BrittleCore(on_step=ZeroDivisionError("oops")), Notes()
    thread = EngineThread(core, asyncio.get_running_loop(), notes)
    thread.start()
    thread.add(long_request("r"))
    await asyncio.wait_for(notes.news.wait(), 5)
    assert notes.dead == ["the engine failed: ZeroDivisionError: oops"]
    assert await asyncio.to_thread(core.closed.wait, 5)
    assert not thread.is_healthy(5.0)
    assert thread.stop()


class EndlessCore(BrittleCore):
    """An engine that has always something to report, at once."""

    steps = 0

    def step(self) -> StepReport:
        self.steps += 1
        return StepReport(self.steps, [], [], {}, [], NO_EVENTS, EngineStats())


class Reader(Notes):
    """Takes reports until one breaks it."""

    def __init__(self, breaks_at: int | None = None) -> None:
        super().__init__()
        self.read: list[int] = []
        self.breaks_at = breaks_at

    def on_report(self, report: StepReport) -> None:
        if report.step == self.breaks_at:
            raise ZeroDivisionError("oops")
        self.read.append(report.step)


async def test_report_that_cannot_be_passed_on_ends_the_engine_since_its_rows_are_lost():
    core, reader = EndlessCore(), Reader(breaks_at=3)
    thread = EngineThread(core, asyncio.get_running_loop(), reader)
    thread.start()
    thread.add(long_request("r"))
    await asyncio.wait_for(reader.news.wait(), 5)
    assert reader.dead == ["a step's report could not be passed on: ZeroDivisionError: oops"]
    assert await asyncio.to_thread(core.closed.wait, 5)
    await asyncio.sleep(0)
    assert reader.read == [1, 2]
    assert not thread.is_healthy(5.0)


async def test_engine_waits_for_an_event_loop_that_is_held_up():
    core, reader = EndlessCore(), Reader()
    thread = EngineThread(core, asyncio.get_running_loop(), reader)
    thread.start()
    thread.add(long_request("r"))
    for _ in range(3):
        read = len(reader.read)
        time.sleep(0.1)  # nothing is read meanwhile
        assert core.steps - read <= MAX_UNDELIVERED + 1
        await until(lambda read=read: len(reader.read) >= read + 2 * MAX_UNDELIVERED)
    assert reader.read == list(range(1, len(reader.read) + 1))
    assert await asyncio.to_thread(thread.stop)
