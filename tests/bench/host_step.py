"""Host time of one `EngineCore.step` around an executor that returns at once, whose own time is left out.

`python -m tests.bench.host_step` prints a table.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
from typing_extensions import override

from cluster.accounts.engine_accounts import EngineAccounts
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.report import SamplingInputs, StepInputs, StepOutputs
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.executor import Executor, Pending
from tests.fake_executor import Done

VOCAB = 32_000
STAGES = ("schedule", "prepare", "update", "report", "accounts")
Stages = dict[str, float]


class ReadyTokens(Executor):
    """Draws tokens that were made beforehand; none of them ends a sequence."""

    def __init__(self) -> None:
        self._tokens = np.random.default_rng(0).integers(3, VOCAB, 1 << 12, dtype=np.int32)
        self._step = 0
        self.spent = 0.0  # seconds in here, which are no host time of the engine

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        began = time.perf_counter()
        self._step = (self._step + 7) % 1024
        pending = Done(StepOutputs(self._tokens[self._step : self._step + len(inputs.logits_indices)]))
        self.spent += time.perf_counter() - began
        return pending

    @override
    def close(self) -> None:
        """Nothing to end."""


class Load:
    """An engine kept at `num_seqs` sequences, at all offsets within their blocks.

    output_len: tokens after which a sequence ends and another, not yet seen, takes its place; None = never.
    """

    def __init__(self, num_seqs: int, output_len: int | None = None) -> None:
        config = EngineConfig("none", max_model_len=8192, max_num_seqs=num_seqs, max_num_batched_tokens=8192)
        self._executor = ReadyTokens()
        self.core = EngineCore(config, self._executor, (2,), VOCAB, num_kv_blocks=num_seqs * 480)
        self.core.call_on_event(EngineAccounts(self.core.clock).note)
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

    def run(self, steps: int) -> list[float]:
        """Return the microseconds that each step of the engine took, without those of its executor."""
        core, executor, found = self.core, self._executor, []
        for _ in range(steps):
            before, began = executor.spent, time.perf_counter()
            report = core.step()
            took = time.perf_counter() - began
            found.append((took - (executor.spent - before)) * 1e6)
            for _ in report.finished:
                self.add()
        return found

    def run_in_stages(self, steps: int) -> Stages:
        """Return the median microseconds per step of each stage; the clock is looked at around what a step calls.

        That takes about a microsecond itself, so the whole is told of steps without.
        """
        core = self.core
        spent = dict.fromkeys(STAGES, 0.0)
        calls = {
            "schedule": [(core._scheduler, "schedule")],
            "prepare": [(core._launcher._inputs, "prepare")],
            "update": [(core._scheduler, name) for name in ("advance", "collect", "note_first_tokens")],
            "report": [(core, "_report")],
            "accounts": [(core._events, "emit")],
        }
        with ExitStack() as stack:
            for stage, parts in calls.items():
                for part, name in parts:
                    timed = _timed(getattr(part, name), spent, stage)
                    stack.enter_context(mock.patch.object(part, name, timed))
            each: dict[str, list[float]] = {stage: [] for stage in STAGES}
            for _ in range(steps):
                spent.update(dict.fromkeys(STAGES, 0.0))
                self.run(1)
                for stage in STAGES:
                    each[stage].append(spent[stage] * 1e6)
        return {stage: float(np.median(values)) for stage, values in each.items()}


def _timed(call: Callable[..., Any], spent: dict[str, float], stage: str) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            spent[stage] += time.perf_counter() - began

    return timed


def measure(steps: int = 1500) -> dict[str, dict[str, float]]:
    """Return microseconds per step, median and 99th percentile, and each stage's median, by kind of load."""
    results = {}
    for name, num_seqs, output_len in (("256", 256, None), ("32", 32, None), ("256 with arrivals", 256, 128)):
        load = Load(num_seqs, output_len)
        load.run(100)
        gc.collect()
        times = load.run(steps)
        figures = {"median": float(np.median(times)), "p99": float(np.percentile(times, 99))}
        results[name] = figures | load.run_in_stages(steps // 3)
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
