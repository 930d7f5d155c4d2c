"""The fake model on a device that is truly late: nothing is computed before its result is asked for."""

from __future__ import annotations

import copy
from collections import deque

from typing_extensions import override

from engine.kv.block_manager import BlockManager, token_bytes
from engine.report import SamplingInputs, StepInputs, StepOutputs
from engine.worker.executor import Pending
from tests.fake_executor import FakeExecutor


class LateExecutor(FakeExecutor):
    """Runs launched steps in order, each when it or a later one is asked for."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size)
        self.queue: deque[LateStep] = deque()
        self.fed: list[list[int]] = []  # the input ids of each step, as they were when it ran
        self.closed = False

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        assert len(self.queue) < 2, "a third step was launched"
        assert not inputs.input_ids[inputs.carried[:, 0]].any(), "the host knows a token that it wants carried"
        step = LateStep(self, copy.deepcopy(inputs), snapshot(sampling))
        self.queue.append(step)
        return step

    def run_until(self, wanted: LateStep) -> None:
        """Run what was launched until then; those that nobody asked for as well."""
        while wanted.outputs is None:
            step = self.queue.popleft()
            step.outputs = self.execute(step.inputs, step.sampling)

    @override
    def _store(self, inputs: StepInputs) -> None:
        super()._store(inputs)
        self.fed.append(inputs.input_ids.tolist())

    @override
    def close(self) -> None:
        self.closed = True

    def check_findable(self, blocks: BlockManager) -> None:
        """Every block that can be found holds, at this moment, the K/V of the tokens that it is found by."""
        for block in blocks._index.values():
            assert token_bytes(self.ids[block].tolist()) == blocks._contents[block], "found before it was computed"


class LateStep(Pending):
    def __init__(self, executor: LateExecutor, inputs: StepInputs, sampling: SamplingInputs) -> None:
        self.inputs, self.sampling = inputs, sampling
        self.outputs: StepOutputs | None = None
        self._executor = executor

    @override
    def result(self) -> StepOutputs:
        self._executor.run_until(self)
        assert self.outputs is not None
        return self.outputs


def snapshot(sampling: SamplingInputs) -> SamplingInputs:
    """Return what a device would have been given: the arrays of the host are overwritten by the next step."""
    masks, whole = sampling.masks, copy.copy(sampling)
    whole.masks = None
    whole = copy.deepcopy(whole)
    if masks is not None:
        made = copy.deepcopy(masks())
        whole.masks = lambda: made
    return whole
