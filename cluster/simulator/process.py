"""Processes that share an event loop in virtual time: each may stop, die, or have its clock leap, as real ones do.

What a process does runs in its own context, so the loop knows of every callback and timer whose it is. Those of a
stopped process wait until it goes on; those of a dead one are dropped, whatever they would have said.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio.events import Handle, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")
LAST_TURNS, AGAIN = 120, 30  # in which what is left ends once the history is over, and between two calls to end
MOST_TURNS = 400_000  # callbacks of one history: a loop without end is told, not waited for


class StuckError(AssertionError):
    """Nothing is left that could happen, or things happen without end."""


class SimulatedProcess:
    """One life of a process. clock: what its clock shows at the beginning of the history; each machine's differs.

    ahead: seconds by which its time of day is.
    """

    def __init__(self, name: str, loop: SimulatedLoop, clock: float = 0.0, ahead: float = 0.0) -> None:
        self.name = name
        self.clock = clock
        self.ahead = ahead
        self.stopped = False
        self.dead = False
        self._loop = loop
        self._held: list[Handle] = []  # what waits until it goes on
        loop.processes.append(self)
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    @property
    def runs(self) -> bool:
        """Whether it does what it has to do now."""
        return not self.stopped and not self.dead

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Have the process do something."""
        return self._loop.create_task(work, context=self.context.copy())

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function as this process, now."""
        return self.context.copy().run(function, *args)

    def stop(self) -> None:
        """Stop it as SIGSTOP does."""
        self.stopped = True

    def go_on(self) -> None:
        """Let it go on; what became due meanwhile happens now."""
        self.stopped = False
        if not self.dead:
            self.release()

    def release(self) -> None:
        """Have what was kept happen now."""
        held, self._held = self._held, []
        self._loop.ready.extend(held)

    def kill(self) -> None:
        """End it as SIGKILL does: nothing of it runs any more."""
        self.dead = True

    def leap(self, seconds: float) -> None:
        """Have its clock leap forward, as that of a machine which slept does."""
        self.clock += seconds
        self._loop.leapt(self, seconds)

    def hold(self, handle: Handle) -> None:
        """Keep what it would do now until it goes on, or to the end of the history if it is dead."""
        self._held.append(handle)


PROCESS: ContextVar[SimulatedProcess | None] = ContextVar("simulated process", default=None)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Starts at 0 s. Without threads: what would be done in one is done at once.

    failures: exceptions that nobody caught. turns: callbacks so far. sockets: `Sockets` between its
    processes.
    """

    sockets: Any

    ready: deque[Handle]

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []
        self.turns = 0
        self.processes: list[SimulatedProcess] = []
        self.ready = self._ready  # type: ignore[attr-defined]
        self._now = 0.0
        self._timers: list[
            tuple[float, int, TimerHandle]
        ] = []  # those of one moment in the order in which they were set
        self._num_timers = 0
        self._ends = False
        self._tasks: list[asyncio.Task[Any]] = []  # kept until the end: what a dead process had begun ends with it
        self.set_exception_handler(self._failed)
        self.set_task_factory(self._begin)  # type: ignore[arg-type]

    @property
    def now(self) -> float:
        """Seconds since the history began."""
        return self._now

    def time(self) -> float:
        """Seconds on the clock of the process that asks."""
        process = PROCESS.get()
        return self._now if process is None else self._now + process.clock

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> TimerHandle:  # type: ignore[override]
        """See `asyncio.loop.call_at`; `when` is on the clock of the process that asks."""
        process = PROCESS.get() if context is None else context.get(PROCESS)
        return self._at(when if process is None else when - process.clock, callback, args, context)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> TimerHandle:  # type: ignore[override]
        """See `asyncio.loop.call_later`."""
        return self._at(self._now + delay, callback, args, context)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        """See `asyncio.loop.call_soon`."""
        handle = Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        """See `asyncio.loop.call_soon_threadsafe`; there is one thread."""
        return self.call_soon(callback, *args, context=context)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect the process that asks to the one that listens at a port."""
        await self.sockets.connect(protocol_factory, port)

    def remove_reader(self, fd: Any) -> Any:
        """Do nothing: connections come to simulated sockets at once."""

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Have the process that asks take connections, at a port that nobody else has."""
        return self.sockets.listen(protocol_factory)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Do it now."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def abandon(self) -> None:
        """End all tasks, those of dead processes included."""
        self._ends = True
        for process in self.processes:
            process.release()
        for turn in range(LAST_TURNS):
            open_ones = [task for task in self._tasks if not task.done()]
            if not open_ones:
                return
            if turn % AGAIN == 0:
                for task in open_ones:
                    task.cancel()
            self.call_soon(self.stop)
            self.run_forever()
        self.failures.append(f"{len(open_ones)} tasks do not end: {open_ones[0]!r}")

    def leapt(self, process: SimulatedProcess, seconds: float) -> None:
        """Have a process's timers be due so much sooner."""
        self._timers[:] = [
            (when - seconds if timer._context.get(PROCESS) is process else when, number, timer)  # type: ignore[attr-defined]
            for when, number, timer in self._timers
        ]
        heapq.heapify(self._timers)

    def get_debug(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Drop what is left."""
        self._timers.clear()
        super().close()

    def _at(self, when: float, callback: Callable[..., Any], args: tuple[Any, ...], context: Any) -> TimerHandle:
        timer = TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _begin(
        self, _: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], context: Context | None = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(work, loop=self, context=context)
        self._tasks.append(task)
        return task

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        pass

    def _failed(self, _: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        self.failures.append(f"{told['message']}: {told.get('exception')!r}")

    def _run_once(self) -> None:
        ready, timers, process_of = self.ready, self._timers, PROCESS
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready and timers:
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        if not ready:
            raise StuckError("nothing is left that could happen, and somebody waits")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(process_of)  # type: ignore[attr-defined]
            if process is not None and (process.stopped or process.dead) and not self._ends:
                process.hold(handle)
                continue
            handle._run()
        self.turns += 1
        if self.turns > MOST_TURNS and not self._ends:
            raise StuckError(f"{MOST_TURNS} turns of the event loop and no end")
