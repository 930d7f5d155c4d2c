"""What the engine is given to do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of token ids, and how many tokens each is followed by."""

    prompts: Sequence[list[int]]
    outputs: Sequence[int]


def nano_vllm(sequences: int = 256, shortest: int = 100, longest: int = 1024) -> Load:
    """Return the load of nano-vLLM's `bench.py`: the same draws in the same order, from seed 0.

    With its own figures, 256 sequences of 100 to 1024 tokens: 142,827 tokens in and 133,966 out.
    """
    draw = random.Random(0).randint
    prompts = [[draw(0, 10_000) for _ in range(draw(shortest, longest))] for _ in range(sequences)]
    return Load(prompts, [draw(shortest, longest) for _ in range(sequences)])


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of `length` ids without special ones."""
    pick = random.Random(seed)
    return [pick.choices(range(10, vocab), k=length) for _ in range(count)]
