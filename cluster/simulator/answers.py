"""What clients of a simulated cluster ask and get, and what they should."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from cluster.simulator.fleet import Fleet
from cluster.simulator.history import Arrive, History
from cluster.simulator.lives import RouterLife, token_at

PROMPT_BASE = 10  # smallest token id of a prompt
# Ends that are no errors. GONE: with the process that held the client's connection.
WHOLE, LEFT, GONE, DELETED = "whole", "left", "gone", "deleted"


@dataclass(eq=False)
class Answer:
    """What a client got. ends: `WHOLE`, `LEFT`, `GONE` or the code of an error; exactly one when all is over.

    kept_as: name of one that the server keeps, and text: its. unwanted: its client asked to have it deleted. deleted:
    it heard that it was. said_gone: it heard instead that there was none.
    """

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
    kept_as: str = ""
    unwanted: bool = False
    deleted: bool = False
    said_gone: bool = False
    text: str = ""


@dataclass(eq=False)
class Scene:
    """A history on its way. violations: what must not be, in words."""

    history: History
    fleet: Fleet
    answers: list[Answer]
    violations: list[str]

    def end(self, answer: Answer, end: str) -> None:
        """Note how an answer ended."""
        answer.ends.append(end)
        answer.ended = self.fleet.loop.now

    def prompt_tokens(self, asked: Arrive) -> int:
        """Return how many tokens the prompt of a client has."""
        if not (asked.chat or asked.kept) or self.fleet.model is None:
            return asked.prompt
        return len(self.fleet.model.tokenizer.encode_chat(messages_of(asked)))

    def texts(self, asked: Arrive) -> list[str]:
        """Return what the text of a kept answer may be."""
        model = self.fleet.model
        return [] if model is None else [model.tokenizer.decode(one[0]) for one in self.expected(asked)]

    def expected(self, asked: Arrive) -> list[dict[int, list[int]]]:
        """Return what an answer may be, by choice: by model version, and by seed where its client gave none."""
        versions = (1, 2) if self.fleet.skewed else (1,)
        seeds = (asked.seed,) if asked.seeded else sorted(self.fleet.seeds)
        first = self.prompt_tokens(asked)
        return [undisturbed(self.history, asked, first, version, seed) for version in versions for seed in seeds]


def prompt_of(asked: Arrive) -> list[int]:
    """Return the prompt of a client."""
    rng = Random(asked.seed)
    return [PROMPT_BASE + int(rng.random() * 200) for _ in range(asked.prompt)]


def messages_of(asked: Arrive) -> list[dict[str, str]]:
    """Return the conversation of a client."""
    return [{"role": "user", "content": "".join([chr(ord("a") + token % 26) for token in prompt_of(asked)])}]


def undisturbed(history: History, asked: Arrive, first: int, version: int, seed: int) -> dict[int, list[int]]:
    """Return the tokens of each choice as a model version draws them, at the positions from `first` on."""
    return {
        choice: [
            token_at(history, version, seed, choice, position) for position in range(first, first + asked.tokens)
        ]
        for choice in range(asked.choices)
    }
