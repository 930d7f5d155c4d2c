"""How long a step takes, as a formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.errors import ConfigError
from engine.report import StepInputs


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
