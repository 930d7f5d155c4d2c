"""The fake model with a recurrent state: all that it stores depends on that, and on no key or value before."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from engine.errors import StepMemoryError
from engine.report import SamplingInputs, StepInputs, StepOutputs
from engine.worker.executor import Pending
from tests.engine.late_executor import LateExecutor
from tests.fake_executor import Words


class RecurrentExecutor(LateExecutor):
    """A late device with slots for the states of running sequences and of snapshots.

    breaks: the next step breaks off for lack of memory, its states half changed.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, num_states: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size)
        self.states: Words = np.arange(9, 9 + num_states).astype(np.uint64)
        self.breaks = False

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        if self.breaks:
            self.breaks = False
            if self.queue:
                self.run_until(self.queue[-1])
            self.states[inputs.slots] += np.uint64(1)
            raise StepMemoryError("no memory for the step")
        return super().launch(inputs, sampling)

    @override
    def execute(self, inputs: StepInputs, sampling: SamplingInputs) -> StepOutputs:
        assert len(inputs.state_sources) == inputs.num_reqs
        outputs = super().execute(inputs, sampling)
        sources, targets = inputs.state_copies.T
        assert not set(targets.tolist()) & {*inputs.slots.tolist(), *sources.tolist()}
        self.states[targets] = self.states[sources]
        return outputs

    @override
    def _store(self, inputs: StepInputs) -> None:
        super()._store(inputs)
        self.states[inputs.slots] = self._cache.reshape(-1)[inputs.slot_mapping[inputs.query_start_loc[1:] - 1]]

    @override
    def _past(self, inputs: StepInputs) -> Words:
        fresh = inputs.state_sources < 0
        assert (fresh == (inputs.num_computed_tokens == 0)).all(), "a state of no tokens, or tokens without a state"
        return np.where(fresh, np.uint64(0), self.states[inputs.state_sources])
