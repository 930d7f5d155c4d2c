"""An engine without a model, on the event loop instead of a thread: steps take the time that a formula says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from cluster.accounts.costs import EngineCosts
from cluster.replica.engine_thread import Command, Engine, EngineListener
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.report import SamplingInputs, StepInputs, StepOutputs, StepReport
from engine.worker.executor import Executor, Pending
from engine.worker.sleep import WEIGHTS

FIRST_TOKEN = 3  # smaller ids are left to whoever wants one that ends a sequence


class SimulatedEngine(Engine):
    """Runs on the event loop. Commands are carried out between steps; a step's report comes when its time is over.

    step_seconds: how long the core's latest step takes, on the clock of the event loop, virtual or not. To the core
    it takes no time, so that all of its device seconds are idle.
    """

    def __init__(
        self,
        core: EngineCore,
        loop: asyncio.AbstractEventLoop,
        listener: EngineListener,
        step_seconds: Callable[[], float],
    ) -> None:
        super().__init__(core, loop, listener)
        self._step_seconds = step_seconds
        self._last_progress = loop.time()
        self._busy = False
        self._stopped = False

    @property
    @override
    def costs(self) -> EngineCosts:
        """The accounts now."""
        self._core.emit_time()
        return self._accounts.costs()

    @property
    @override
    def progress_age(self) -> float:
        """Seconds since the engine finished a step; 0 while it has nothing to do."""
        return self._loop.time() - self._last_progress if self._busy else 0.0

    @override
    def is_healthy(self, deadline: float) -> bool:
        """Whether it moved within the last `deadline` seconds."""
        return not self._stopped and self.progress_age <= deadline

    @override
    def start(self) -> None:
        """Nothing to begin: the first command does."""

    @override
    def stop(self, timeout: float = 10.0) -> bool:
        """End it."""
        self._stopped = True
        self._core.close()
        return True

    @override
    def _wake_up(self) -> None:
        if not self._busy:
            self._busy = True
            self._last_progress = self._loop.time()
            self._loop.call_soon(self._step)

    @override
    def _publish(self, outcome: Command) -> None:
        outcome()

    def _step(self) -> None:
        """Start a step, if there is anything to do."""
        if self._stopped:
            return
        self._take_orders()
        if self._core.has_unfinished and not self._core.is_sleeping:
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
        self._step()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step = base + what its tokens cost. Raises `ConfigError`.

    The defaults have the proportions of an 8B model on one data-centre GPU: 25,000 prompt tokens a second, 125 steps
    a second for one sequence, and a batch of 64 sequences in twice the time of one.

    base: of any step. prompt_token: of each token of a prompt. sequence: of each sequence that decodes.
    context_token: of each token that a decoding sequence attends to.
    """

    base: float = 8e-3
    prompt_token: float = 4e-5
    sequence: float = 5e-5
    context_token: float = 3e-8

    def __post_init__(self) -> None:
        for name in ("prompt_token", "sequence", "context_token"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0 seconds, not {getattr(self, name)}", name)
        if self.base <= 0:
            raise ConfigError(f"base must be above 0 seconds, not {self.base}", "base")

    def of(self, inputs: StepInputs) -> float:
        """Return the seconds that a step with these inputs takes."""
        decodes = np.diff(inputs.query_start_loc) == 1
        sequences = int(decodes.sum())
        context = int(inputs.seq_lens[decodes].sum())
        prompt = inputs.num_tokens - sequences
        return self.base + self.prompt_token * prompt + self.sequence * sequences + self.context_token * context


class _Drawn(Pending):
    """A step whose results are there."""

    def __init__(self, outputs: StepOutputs) -> None:
        self._outputs = outputs

    @override
    def result(self) -> StepOutputs:
        return self._outputs


class ModelledExecutor(Executor):
    """In the place of a worker group: draws tokens, which depend on nothing but seed and position, at no cost.

    It says how long the step would have taken.

    last_step: seconds of the step that was executed last. version: of the weights; each draws other tokens. folder:
    returns the version that is read when it wakes from level 2.
    """

    def __init__(
        self, times: StepTimes, vocab_size: int, version: int = 1, folder: Callable[[], int] = lambda: 1
    ) -> None:
        self.last_step = 0.0
        self.version = version
        self._folder = folder
        self._level = 0
        self._times = times
        self._span = vocab_size - FIRST_TOKEN

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        self.last_step = self._times.of(inputs)
        seeds = sampling.seeds + 7919 * sampling.choices + 104729 * (self.version - 1)
        drawn = simulated_tokens(seeds, sampling.positions, self._span)
        return _Drawn(StepOutputs(drawn.astype(np.int32)))

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Of the weights."""
        return f"model-{self.version}"

    @override
    def sleep(self, level: int) -> None:
        self._level = level

    @override
    def wake(self, tag: str) -> None:
        if self._level == 2 and tag == WEIGHTS:
            self.version = self._folder()

    @override
    def close(self) -> None:
        """Nothing to end."""


def simulated_tokens(seeds: np.ndarray, positions: np.ndarray, span: int) -> np.ndarray:
    """Return the token of each seed at each position, the same on every replica. [n]"""
    mixed = seeds.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return FIRST_TOKEN + ((mixed >> np.uint64(32)) % np.uint64(span)).astype(np.int64)
