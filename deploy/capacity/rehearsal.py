"""A load on one replica in virtual time: the engine's own scheduler, with steps as long as the plan says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from typing_extensions import override

from cluster.simulator.engine import simulated_tokens
from deploy.capacity.fit import GpuFit
from deploy.capacity.load import ExpectedLoad
from deploy.capacity.steady import Flow
from deploy.capacity.step_time import Shares, Steps
from engine.core import EngineCore
from engine.report import SamplingInputs, StepInputs, StepOutputs, StepReport
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.executor import Executor, Pending

VOCABULARY = 32_000  # of the tokens that are drawn, which mean nothing
REQUESTS = 300  # that are measured
WARM_UP = 2.0  # requests that are not measured, at first, for each that runs at a time


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the requests of a load got. Seconds; p95: of 95 % of them at most. rps: that ended a second."""

    requests: int
    rps: float
    ttft: float
    ttft_p95: float
    tpot: float
    tpot_p95: float


@dataclass(slots=True)
class _Clock:
    now: float = 0.0


class VirtualDevice(Executor):
    """Draws tokens that mean nothing, in steps that take as long as a formula says, one after another."""

    def __init__(self, steps: Steps, shares: Shares, clock: _Clock) -> None:
        self._steps, self._shares, self._clock = steps, shares, clock
        self._free_at = 0.0

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        seconds = self._steps.of(inputs).expected(self._shares)
        self._free_at = max(self._free_at, self._clock.now) + seconds
        tokens = simulated_tokens(sampling.seeds, sampling.positions, VOCABULARY - 3).astype(np.int32)
        return _Running(StepOutputs(tokens), self._free_at, self._clock)

    @override
    def close(self) -> None:
        """Nothing to end."""


class _Running(Pending):
    """A step that has run when the clock says so."""

    def __init__(self, outputs: StepOutputs, ends_at: float, clock: _Clock) -> None:
        self._outputs, self._ends_at, self._clock = outputs, ends_at, clock

    @override
    def result(self) -> StepOutputs:
        self._clock.now = max(self._clock.now, self._ends_at)
        return self._outputs


@dataclass(slots=True)
class _Asked:
    """A request on its way: when it came, when its first and its last token did."""

    came: float
    first: float | None = None
    last: float = 0.0


@dataclass(slots=True)
class _Run:
    """One run: what is asked, and what has ended."""

    core: EngineCore
    clock: _Clock
    load: ExpectedLoad
    rng: Random
    live: dict[str, _Asked] = field(default_factory=dict)
    ended: list[_Asked] = field(default_factory=list)
    count: int = 0

    def ask(self, came: float) -> None:
        """Send one more request."""
        name = f"r{self.count}"
        self.count += 1
        prompt = tuple(self.rng.choices(range(3, VOCABULARY), k=self.load.input_len))
        params = SamplingParams(max_tokens=self.load.output_len, ignore_eos=True)
        self.live[name] = _Asked(came)
        self.core.add(Request(name, prompt, params, seed=self.count))

    def step(self) -> int:
        """Run a step; return how many requests ended."""
        report = self.core.step()
        self._note(report)
        return len(report.finished)

    def _note(self, report: StepReport) -> None:
        for sequence in report.sequences:
            asked = self.live[sequence.request.request_id]
            asked.first = self.clock.now if asked.first is None else asked.first
            asked.last = self.clock.now
        for finish in report.finished:
            self.ended.append(self.live.pop(finish.sequence.request.request_id))


def rehearse(fit: GpuFit, load: ExpectedLoad, flow: Flow, requests: int = REQUESTS, seed: int = 0) -> Rehearsal:
    """Return what `requests` requests get of one replica when they come at random, as many a second as in `flow`."""
    run = _start(fit, load, seed)
    arrivals = _poisson(flow.rps, Random(seed + 1))
    following = next(arrivals)
    warm_up = math.ceil(WARM_UP * flow.sequences)
    while len(run.ended) < warm_up + requests:
        while following <= run.clock.now:
            run.ask(following)
            following = next(arrivals)
        if run.core.has_unfinished:
            run.step()
        else:
            run.clock.now = following
    return _result(run, warm_up)


def saturate(fit: GpuFit, load: ExpectedLoad, flow: Flow, requests: int = REQUESTS, seed: int = 0) -> Rehearsal:
    """Return what requests get when each of `flow.sequences` clients asks again as soon as it was answered."""
    run = _start(fit, load, seed)
    clients, warm_up = round(flow.sequences), math.ceil(WARM_UP * flow.sequences)
    apart = flow.tpot * load.output_len / clients  # else all answers would end in the same step for ever
    begun = 0
    while len(run.ended) < warm_up + requests:
        while begun < clients and run.clock.now >= begun * apart:
            run.ask(run.clock.now)
            begun += 1
        for _ in range(run.step() if run.core.has_unfinished else 0):
            run.ask(run.clock.now)
        if not run.core.has_unfinished:
            run.clock.now = begun * apart
    return _result(run, warm_up)


def _start(fit: GpuFit, load: ExpectedLoad, seed: int) -> _Run:
    clock = _Clock()
    config = replace(fit.config, enable_prefix_caching=False)
    device = VirtualDevice(Steps(fit), load.shares, clock)
    core = EngineCore(config, device, (0,), VOCABULARY, fit.num_blocks, clock=lambda: clock.now)
    return _Run(core, clock, load, Random(seed))


def _poisson(rps: float, rng: Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += rng.expovariate(rps)
        yield at


def _result(run: _Run, spared: int) -> Rehearsal:
    measured = run.ended[spared:]
    first = np.array([(asked.first or asked.last) - asked.came for asked in measured])
    tokens = max(run.load.output_len - 1, 1)
    between = np.array([(asked.last - (asked.first or asked.last)) / tokens for asked in measured])
    since = run.ended[spared - 1].last if spared else 0.0
    return Rehearsal(
        len(measured),
        len(measured) / (run.ended[-1].last - since),
        float(first.mean()),
        float(np.quantile(first, 0.95)),
        float(between.mean()),
        float(np.quantile(between, 0.95)),
    )
