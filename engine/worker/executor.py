"""The border between the engine core and whatever computes a step."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.errors import ConfigError
from engine.report import SamplingInputs, StepInputs, StepOutputs


class Pending(ABC):
    """A step that was given to the device."""

    @property
    def has_run(self) -> bool:
        """Whether `result` would not have to wait; asking costs little."""
        return True

    @abstractmethod
    def result(self) -> StepOutputs:
        """Wait until the step has run and return what it brought. Asked for once, or never.

        Raises `EngineDeadError` when a rank died or missed the step deadline.
        """


class Executor(ABC):
    """Runs one step on all ranks of a tensor-parallel group and samples on rank 0.

    Used by one thread. After any exception but `StepMemoryError` the group is unusable: `close` it.

    most_draws: tokens that a row draws in a step at most; how many it did is a result (`StepOutputs.counts`).
    fingerprint: the `replica_fingerprint` of what is loaded; waking may change it.
    """

    most_draws: int = 1
    fingerprint: str = ""

    @abstractmethod
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        """Broadcast `inputs`, run the model, sample `len(inputs.logits_indices)` tokens.

        Returns as soon as the device knows its work, which it does in the order of the launches; on a CPU, where host
        and model share the cores, that is when it is done. The arrays may be overwritten as soon as it returns.

        Raises `EngineDeadError` when a rank died or missed the step deadline, and `StepMemoryError` when memory for
        this step ran out on a group of one; of several ranks the others would wait in vain, so those die of it.
        """

    def execute(self, inputs: StepInputs, sampling: SamplingInputs) -> StepOutputs:
        """Launch a step and wait for its result."""
        return self.launch(inputs, sampling).result()

    def sleep(self, level: int) -> None:
        """Give back the memory of the KV cache and of the weights, no step being on its way.

        level: 1 keeps the weights in the host's memory, 2 has them read again at waking. Nothing may be launched
        until each of `engine.worker.sleep.TAGS` was woken. Raises `StepMemoryError` where the host has no room for
        the weights, after which a group of one is awake, or `EngineDeadError`.
        """
        raise ConfigError(f"{type(self).__name__} cannot sleep", "level")

    def wake(self, tag: str) -> None:
        """Take the memory of one of `engine.worker.sleep.TAGS` again; the KV cache is empty.

        Weights are as before, or after level 2 what the folder holds by now, and `fingerprint` says which.

        Raises `CheckpointError` or `StepMemoryError`, after which a group of one still sleeps, or `EngineDeadError`.
        """
        raise ConfigError(f"{type(self).__name__} cannot sleep", "tags")

    @abstractmethod
    def close(self) -> None:
        """End all ranks and free their memory. Can be called twice, with steps on their way."""
