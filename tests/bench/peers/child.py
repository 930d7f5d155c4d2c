"""What every engine is asked, in a process of its own environment: needs no more than the standard library.

An engine's file is run as `PYTHON run_NAME.py JOB ANSWER`, two files of JSON. It makes a `Generate` of the model and
calls `answer`, which measures it and writes the figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Token ids of prompts, and how many tokens each wants -> the tokens of each; end-of-sequence is a token as any other.
Generate = Callable[[list[list[int]], list[int]], list[list[int]]]


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts, and how many tokens each wants."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def total(self) -> int:
        """How many tokens are wanted in all."""
        return sum(self.outputs)


@dataclass(frozen=True)
class Job:
    """What an engine shall do.

    model: a checkpoint's folder. converted: the same weights as the engine's own format, where it has one. dtype: of
    the weights. activations: float32 or bfloat16, which is another one where weights are in int8 or int4. isa: what
    the CPU is taken for. alone: prompts run one after the other. first: prompts whose first token is timed. checked:
    prompts whose tokens are answered, to compare them.
    """

    model: str
    converted: str
    dtype: str
    activations: str
    isa: str
    threads: int
    max_model_len: int
    warm_up: Prompts
    mixed: Prompts
    even: Prompts
    alone: Prompts
    first: Prompts
    checked: Prompts

    @classmethod
    def read(cls, file: Path) -> Job:
        """Return what `write` wrote."""
        fields = json.loads(file.read_text())
        return cls(**{name: Prompts(**value) if isinstance(value, dict) else value for name, value in fields.items()})

    def write(self, file: Path) -> None:
        """Write it for the process that will `read` it."""
        file.write_text(json.dumps(asdict(self)))


def asked() -> Job:
    """Return the job of this process."""
    return Job.read(Path(sys.argv[1]))


def answer(generate: Generate, job: Job, version: str, *, note: str = "") -> None:
    """Measure `generate` and write what was found, for the process that asked.

    note: what a reader has to know of the way that this engine was run.
    """
    found = {"figures": measured(generate, job), "version": version, "note": note}
    found["tokens"] = generate(job.checked.prompts, job.checked.outputs)
    Path(sys.argv[2]).write_text(json.dumps(found))


def measured(generate: Generate, job: Job) -> dict[str, float]:
    """Return tokens/s of both loads, milliseconds a token alone, and milliseconds to a first token.

    The last two are medians over their prompts.
    """
    seconds(generate, job.warm_up.prompts, job.warm_up.outputs)
    mixed, even = (job.mixed.total / seconds(generate, each.prompts, each.outputs) for each in (job.mixed, job.even))
    alone = []
    for prompt, count in zip(job.alone.prompts, job.alone.outputs, strict=True):
        prefill, whole = (seconds(generate, [prompt], [tokens]) for tokens in (1, count + 1))
        alone.append((whole - prefill) / count)
    first = [seconds(generate, [prompt], [1]) for prompt in job.first.prompts]
    return {
        "mixed_tokens_per_s": mixed,
        "even_tokens_per_s": even,
        "alone_ms": 1e3 * statistics.median(alone),
        "first_ms": 1e3 * statistics.median(first),
    }


def seconds(generate: Generate, prompts: list[list[int]], outputs: Sequence[int]) -> float:
    """Return how long `generate` took. Raises `RuntimeError` where some sequence has another length than wanted."""
    began = time.perf_counter()
    found = generate(prompts, list(outputs))
    passed = time.perf_counter() - began
    if (lengths := [len(tokens) for tokens in found]) != list(outputs):
        raise RuntimeError(f"answers of {lengths} tokens, wanted were {list(outputs)}")
    return passed
