"""Host time of one engine step (schedule + prepare + update + report) around an executor whose own time is left out.

`python -m tests.bench.host_step` prints a table.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from typing_extensions import override

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor import Done, Executor, Pending
from engine.report import SamplingInputs, StepInputs, StepOutputs
from engine.request import Request
from engine.sampling_params import SamplingParams

VOCAB = 32_000
STAGES = ("schedule", "prepare", "update", "report", "ledger")
T = TypeVar("T")
Times = dict[str, list[float]]


class ReadyTokens(Executor):
    """Draws tokens that were made beforehand; none of them ends a sequence."""

    def __init__(self) -> None:
        self._tokens = np.random.default_rng(0).integers(3, VOCAB, 1 << 12, dtype=np.int32)
        self._step = 0

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        self._step = (self._step + 7) % 1024
        return Done(StepOutputs(self._tokens[self._step : self._step + len(inputs.logits_indices)]))

    @override
    def close(self) -> None:
        """Nothing to end."""


class Load:
    """An engine kept at `num_seqs` sequences, at all offsets within their blocks.

    output_len: tokens after which a sequence ends and another, not yet seen, takes its place; None = never.
    """

    def __init__(self, num_seqs: int, output_len: int | None = None) -> None:
        config = EngineConfig("none", max_model_len=8192, max_num_seqs=num_seqs, max_num_batched_tokens=8192)
        self.core = EngineCore(config, ReadyTokens(), (2,), VOCAB, num_kv_blocks=num_seqs * 480)
        self._pick = random.Random(0)
        self._output_len = output_len
        self._added = 0
        for _ in range(num_seqs):
            self.add(first=True)
        while self.core.stats().outstanding_tokens:
            self.core.step()

    def add(self, first: bool = False) -> None:
        """Add a request of 32 to 512 prompt tokens. first: it seems to have been running for a while."""
        prompt = tuple(self._pick.choices(range(3, VOCAB), k=self._pick.randrange(32, 512)))
        length = self._output_len or 7000
        if first and self._output_len:
            length = self._pick.randrange(length // 4, length)
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=length)
        self.core.add(Request(f"r{self._added}", prompt, params, seed=self._added))
        self._added += 1

    def run(self, steps: int) -> Times:
        """Return the microseconds that each stage of each step took."""
        times: Times = {stage: [] for stage in (*STAGES, "total")}
        for _ in range(steps):
            spent = self._step()
            for stage, value in zip(STAGES, spent, strict=True):
                times[stage].append(value)
            times["total"].append(sum(spent))
        return times

    def _step(self) -> list[float]:
        """Do what `EngineCore.step` does, with a look at the clock in between."""
        core, begun = self.core, time.perf_counter()
        core._ledger.idle(time.monotonic())
        marks = [time.perf_counter()]
        schedule = _timed(marks, core._scheduler.schedule)
        assert schedule is not None
        inputs, sampling = _timed(marks, lambda: core._launcher._inputs.prepare(schedule))
        outputs = core._executor.execute(inputs, sampling)
        ran = time.perf_counter()
        core._scheduler.advance(schedule)
        advanced = time.perf_counter()
        core._ledger.ran(schedule, *core._scheduler.batch(), time.monotonic())
        executed = time.perf_counter()
        core._scheduler.land(schedule, outputs.token_ids)
        core._scheduler.note_births(executed)
        updated = time.perf_counter()
        report = core._report(schedule, outputs)
        reported = time.perf_counter()
        for _ in report.finished:
            self.add()
        ledger = marks[0] - begun + executed - advanced
        update = advanced - ran + updated - executed
        stages = marks[1] - marks[0], marks[2] - marks[1], update, reported - updated, ledger
        return [seconds * 1e6 for seconds in stages]


def _timed(marks: list[float], action: Callable[[], T]) -> T:
    result = action()
    marks.append(time.perf_counter())
    return result


def measure(steps: int = 1500) -> dict[str, dict[str, float]]:
    """Return microseconds per step, median and 99th percentile, and each stage's median, by kind of load."""
    results = {}
    for name, num_seqs, output_len in (("256", 256, None), ("32", 32, None), ("256 with arrivals", 256, 128)):
        load = Load(num_seqs, output_len)
        load.run(100)
        gc.collect()
        times = load.run(steps)
        figures = {"median": float(np.median(times["total"])), "p99": float(np.percentile(times["total"], 99))}
        results[name] = figures | {stage: float(np.median(times[stage])) for stage in STAGES}
    return results


def main() -> None:
    """Print the figures."""
    results = measure()
    columns = list(results["256"])
    print("host us per step".ljust(20), *(column.rjust(9) for column in columns))
    for name, figures in results.items():
        print(name.ljust(20), *(f"{figures[column]:9.1f}" for column in columns))


if __name__ == "__main__":
    main()
