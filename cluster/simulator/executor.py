"""In the tensor-parallel group's place: no K/V, no weights, tokens that depend on nothing but seed and position."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from cluster.simulator.step_time import StepTimes
from engine.report import SamplingInputs, StepInputs, StepOutputs
from engine.worker.executor import Done, Executor, Pending

FIRST_TOKEN = 3  # smaller ids are left to whoever wants one that ends a sequence


class ModelledExecutor(Executor):
    """Draws tokens at no cost and says how long the step would have taken.

    last_step: seconds of the step that was executed last.
    """

    def __init__(self, times: StepTimes, vocab_size: int) -> None:
        self.last_step = 0.0
        self._times = times
        self._span = vocab_size - FIRST_TOKEN

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        self.last_step = self._times.of(inputs)
        drawn = simulated_tokens(sampling.seeds + 7919 * sampling.choices, sampling.positions, self._span)
        return Done(StepOutputs(drawn.astype(np.int32)))

    @override
    def close(self) -> None:
        """Nothing to end."""


def simulated_tokens(seeds: np.ndarray, positions: np.ndarray, span: int) -> np.ndarray:
    """Return the token of each seed at each position, the same on every replica. [n]"""
    mixed = seeds.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return FIRST_TOKEN + ((mixed >> np.uint64(32)) % np.uint64(span)).astype(np.int64)
