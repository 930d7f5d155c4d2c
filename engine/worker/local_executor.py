"""Executors: one rank in this process, alone or as the driver of a worker group.

`engine.worker.executor_start` makes them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch
from typing_extensions import override

from engine.device.gpu import as_step_memory_error
from engine.device.host_memory import give_back
from engine.errors import EngineDeadError
from engine.inputs.step_messages import StepWriter
from engine.report import SamplingInputs, StepInputs, StepOutputs
from engine.sampling.sharded_draw import pack_draws
from engine.threads import ThreadShare
from engine.worker.executor import Executor, Pending
from engine.worker.runner import ModelRunner
from engine.worker.sleep import WEIGHTS
from engine.worker.worker import pack_sleep, pack_wake
from parallel.channel import Buffer, Channel
from parallel.errors import ChannelTimeout, ParallelError
from parallel.group import Group

LAST_WORDS = 0.5  # seconds for a dying rank's reason to arrive
LOOK = 20e-6  # seconds between two looks whether a GPU has run a step
LOOK_AROUND = 0.5  # and whether all ranks are still there


class Workers(Protocol):
    """The processes of ranks 1 to N-1: a `parallel.launcher.LocalWorkerGroup`, or Ray actors."""

    def check(self) -> None:
        """Raise with the reason when any rank has ended."""

    def kill(self) -> None:
        """End all ranks at once, hung ones included. Can be called twice."""


class SoloExecutor(Executor):
    """A model on one device, in this process. threads: what it computes with on a CPU, given back with it."""

    def __init__(self, runner: ModelRunner, threads: ThreadShare | None = None) -> None:
        self._runner: ModelRunner | None = runner
        self._threads = threads
        self.fingerprint = runner.fingerprint

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        if self._runner is None:
            raise EngineDeadError("the executor is closed")
        with as_step_memory_error():
            return _launched(self._runner, inputs, sampling, self._threads)

    @override
    def sleep(self, level: int) -> None:
        with as_step_memory_error("sleep"):
            self._awake().sleep(level)

    @override
    def wake(self, tag: str) -> None:
        with as_step_memory_error("waking up"):
            self._awake().wake(tag)
            if tag == WEIGHTS:
                self.fingerprint = self._awake().fingerprint

    @override
    def close(self) -> None:
        runner, self._runner = self._runner, None
        if self._threads is not None:
            self._threads.give_back()
        if runner is not None:
            device = runner.group.device
            runner.close()
            del runner  # the last to hold the model
            give_back_idle(device)

    def _awake(self) -> ModelRunner:
        if self._runner is None:
            raise EngineDeadError("the executor is closed")
        return self._runner


class WorkerGroupExecutor(Executor):
    """The driver of a worker group: rank 0, in this process, sends the workers each step, then runs its share of it.

    Any error ends the whole worker group. Owns `group`, `channel`, `workers` and `threads`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        group: Group,
        channel: Channel,
        workers: Workers,
        threads: ThreadShare | None = None,
    ) -> None:
        self._runner: ModelRunner | None = runner
        self._threads = threads
        self._group = group
        self._channel = channel
        self._workers = workers
        self._timeout = runner.config.step_timeout
        self._steps = StepWriter(runner.block_table)
        self._number = 0
        self.fingerprint = runner.fingerprint

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        if self._runner is None:
            raise EngineDeadError("the executor is closed")
        self._number += 1
        with self.in_step(self._number):
            inputs.draws = pack_draws(sampling, self._group.device)
            began = time.perf_counter()
            self._channel.send(self._steps.pack(inputs, self._number), self._timeout)
            sending = time.perf_counter() - began
            pending = _launched(self._runner, inputs, sampling, self._threads)
            return _WorkerGroupPending(self, self._number, pending, sending)

    @override
    def sleep(self, level: int) -> None:
        with self._ordered(pack_sleep(level), "while it fell asleep") as runner:
            runner.sleep(level)

    @override
    def wake(self, tag: str) -> None:
        with self._ordered(pack_wake(tag), "while it woke up") as runner:
            runner.wake(tag)
            if tag == WEIGHTS:
                self.fingerprint = runner.fingerprint

    def wait_for(self, pending: Pending) -> None:
        """Wait for a step while all ranks are there. Raises what `Workers.check` does when one has ended.

        A GPU that waits for a rank that is gone or hangs waits for good, and so would the host with it: raises
        `ChannelTimeout` after `step_timeout`.
        """
        began = time.monotonic()
        due = began + LOOK_AROUND
        while not pending.has_run:
            time.sleep(LOOK)
            if (now := time.monotonic()) > due:
                self._workers.check()
                if now > began + self._timeout:
                    raise ChannelTimeout(self._hung())
                due = now + LOOK_AROUND

    def _hung(self) -> str:
        behind = ", ".join(map(str, self._channel.readers_behind()))
        return f"rank {behind} did not come back from it" if behind else "a device did not get to its end"

    def check(self) -> None:
        """Raise `EngineDeadError` when a worker has ended. For watchers; any thread."""
        reason = _death(self._workers)
        if reason is not None:
            raise EngineDeadError(reason)

    @override
    def close(self) -> None:
        runner, self._runner = self._runner, None
        # First the workers: closing channel and group would wait for one that hangs.
        self._workers.kill()
        if runner is not None:
            runner.close()
        self._channel.close()
        self._group.close()
        del runner
        give_back_idle(self._group.device)
        if self._threads is not None:
            self._threads.give_back()

    @contextmanager
    def _ordered(self, order: Buffer, when: str) -> Iterator[ModelRunner]:
        """Send the other ranks an order that rank 0 then follows as well."""
        if self._runner is None:
            raise EngineDeadError("the executor is closed")
        with self.breaks_on_error(when):
            self._channel.send(order, self._timeout)
            yield self._runner

    def in_step(self, number: int) -> AbstractContextManager[None]:
        """End the worker group on any error in a step."""
        return self.breaks_on_error(f"in step {number}", self._timeout)

    @contextmanager
    def breaks_on_error(self, when: str, step_timeout: float | None = None) -> Iterator[None]:
        """End the worker group on any error, and say when, and why where a rank knows.

        step_timeout: seconds after which what is run counts as hung, where that is the setting.
        """
        try:
            yield
        except ParallelError as error:
            late = step_timeout is not None and isinstance(error, ChannelTimeout)
            setting = f"; step_timeout is {step_timeout:g} s" if late else ""
            reason = exit_reason(self._workers) or f"{error}{setting}"
            self.close()
            raise EngineDeadError(f"the tensor-parallel group broke {when}: {reason}") from error
        except BaseException:
            self.close()  # the ranks are out of step
            raise


class _WorkerGroupPending(Pending):
    """A step of a worker group. sending: seconds that it took to send it to the other ranks."""

    def __init__(self, executor: WorkerGroupExecutor, number: int, pending: Pending, sending: float) -> None:
        self._executor = executor
        self._number = number
        self._pending = pending
        self._sending = sending

    @property
    @override
    def has_run(self) -> bool:
        return self._pending.has_run

    @override
    def result(self) -> StepOutputs:
        with self._executor.in_step(self._number):
            self._executor.wait_for(self._pending)
            outputs = self._pending.result()
        outputs.channel = self._sending
        return outputs


def give_back_idle(device: torch.device) -> None:
    """Let the driver have what torch keeps of a GPU's memory, unless steps still run there.

    The driver waits for those, and one that waits for a rank that is gone never ends.
    """
    if device.type != "cuda":
        return
    with suppress(RuntimeError):  # a device that has failed has nothing to give
        if torch.cuda.current_stream(device).query():
            give_back(device)


def _launched(
    runner: ModelRunner, inputs: StepInputs, sampling: SamplingInputs, threads: ThreadShare | None
) -> Pending:
    if threads is not None:
        threads.bind_thread()  # whichever thread runs the steps: in a server not the one that loaded the model
    pending = runner.launch(inputs, sampling)
    if pending is None:
        raise RuntimeError("the runner sampled nothing although it was asked to")
    return pending


def _death(workers: Workers) -> str | None:
    try:
        workers.check()
    except (ParallelError, EngineDeadError) as error:
        return str(error)
    return None


def exit_reason(workers: Workers) -> str | None:
    """Return why a worker ended. A broken connection is often seen before the death behind it, so wait a little."""
    deadline = time.monotonic() + LAST_WORDS
    while (reason := _death(workers)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return reason
