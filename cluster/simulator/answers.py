"""What clients of a simulated cluster ask and get, and what they should."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from cluster.simulator.fleet import Fleet, RouterLife, token_at
from cluster.simulator.history import Arrive, History

PROMPT_BASE = 10  # smallest token id of a prompt
# Ends that are no errors. GONE: with the process that held the client's connection.
WHOLE, LEFT, GONE = "whole", "left", "gone"


@dataclass(eq=False)
class Answer:
    """What a client got. ends: `WHOLE`, `LEFT`, `GONE` or the code of an error; exactly one when all is over."""

    asked: Arrive
    name: str
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    status: int = 0
    began: float = 0.0
    ended: float = 0.0
    body: bytes = b""
    task: asyncio.Task[None] | None = None
    router: RouterLife | None = None


@dataclass(eq=False)
class Scene:
    """A history on its way. violations: what must not be, in words."""

    history: History
    fleet: Fleet
    answers: list[Answer]
    violations: list[str]


def prompt_of(asked: Arrive) -> list[int]:
    """Return the prompt of a client."""
    rng = Random(asked.seed)
    return [PROMPT_BASE + int(rng.random() * 200) for _ in range(asked.prompt)]


def undisturbed(history: History, asked: Arrive, version: int) -> dict[int, list[int]]:
    """Return the tokens of each choice as a model version draws them."""
    return {
        choice: [
            token_at(history, version, asked.seed, choice, position)
            for position in range(asked.prompt, asked.prompt + asked.tokens)
        ]
        for choice in range(asked.choices)
    }
