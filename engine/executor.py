"""The border between the engine core and whatever computes a step."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.report import SamplingInputs, StepInputs, StepOutputs


class Executor(ABC):
    """Runs one step on all ranks of a tensor-parallel group and samples on rank 0.

    Used by one thread. After any exception but `StepMemoryError` the group is unusable: `close` it.
    """

    @abstractmethod
    def execute(self, inputs: StepInputs, sampling: SamplingInputs) -> StepOutputs:
        """Broadcast `inputs`, run the model, sample `len(inputs.logits_indices)` tokens.

        Raises `EngineDeadError` when a rank died or missed the step deadline, and `StepMemoryError` when memory for
        this step ran out on a group of one; of several ranks the others would wait in vain, so those die of it.
        """

    @abstractmethod
    def close(self) -> None:
        """End all ranks and free their memory. Can be called twice."""
