"""The engine as the bench drives it: opened, filled with sequences, stepped."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import config_fields
from engine.llm import LLM
from engine.report import StepReport
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.bench.gpu.bench import NotHere
from tests.bench.gpu.loads import random_prompts


@dataclass(frozen=True, slots=True)
class Steady:
    """Steps that all did the same, by window. wall: seconds per step. tokens: per step, that reached the host."""

    wall: list[float]
    tokens: list[int]

    @property
    def rates(self) -> list[float]:
        """Tokens/s of each window."""
        return [count / seconds for count, seconds in zip(self.tokens, self.wall, strict=True)]


def supported(**settings: Any) -> dict[str, Any]:
    """Return the settings. Raises `NotHere` naming one that this version of the engine does not have."""
    for name in settings:
        if name not in config_fields():
            raise NotHere(f"this version has no --{name.replace('_', '-')}")
    return settings


class Session:
    """One engine and its steps. Used by one thread."""

    def __init__(self, llm: LLM, device: torch.device) -> None:
        self.llm = llm
        self.device = device
        self.core = llm._core
        self._numbers = itertools.count()

    def add(self, prompts: Sequence[list[int]], tokens: int) -> list[str]:
        """Add requests that draw `tokens` tokens whatever these are; returns their ids."""
        params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True)
        names = [f"bench-{next(self._numbers)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.core.add(Request(name, tuple(prompt), params, seed=len(name)))
        return names

    def fill(self, batch: int, context: int, tokens: int) -> list[str]:
        """Add `batch` sequences with prompts of `context` tokens and step until all of them decode."""
        vocab = self.llm.info.vocab_size
        names = self.add(random_prompts(batch, context, vocab, seed=next(self._numbers)), tokens)
        while self.core.stats().outstanding_tokens:
            self.core.step()
        return names

    def clear(self, names: Sequence[str]) -> None:
        """End requests, and step until nothing is left."""
        for name in names:
            self.core.abort(name)
        while self.core.has_unfinished:
            self.core.step()

    def steady(self, batch: int, warm: int, windows: int, steps: int) -> Steady:
        """Time `windows` windows of `steps` steps of what runs, after `warm` others.

        Raises `RuntimeError` when these were not steps in which `batch` sequences draw a token each, or ran without
        the CUDA graph that they were to have.
        """
        self.skip(warm)
        found = Steady([], [])
        for _ in range(windows):
            reports = self._window(steps, found.wall)
            counts = {len(report.token_ids) for report in reports}
            if counts != {batch}:
                raise RuntimeError(f"steps of {batch} sequences drew {min(counts)} to {max(counts)} tokens")
            found.tokens.append(batch)
        self.refuse_lost_graphs()
        return found

    def refuse_lost_graphs(self) -> None:
        """Raise `RuntimeError` where a graph that was to be captured was not: steps ran without, which is slower."""
        if self.device.type != "cuda" or self.llm.info.config.enforce_eager:
            return
        pools = self.core._executor._runner._forward.pools
        if not pools or not pools[0].captured:
            raise RuntimeError("no CUDA graph was captured")
        for pool in pools:
            for size, reason in pool.failures.items():
                raise RuntimeError(f"no CUDA graph of {pool.what % size} was captured: {reason}")

    def skip(self, steps: int) -> None:
        """Compute so many steps."""
        for _ in range(steps):
            self.core.step()

    def _window(self, steps: int, wall: list[float]) -> list[StepReport]:
        """From when one step's tokens are on the host to when the last one's are.

        Nothing waits for the device in between: a step that is under way when a window begins counts as much in it as
        the one that is under way when it ends in the next.
        """
        began = time.perf_counter()
        reports = [self.core.step() for _ in range(steps)]
        wall.append((time.perf_counter() - began) / steps)
        return reports


@contextmanager
def session(folder: Path, device: torch.device, **settings: Any) -> Iterator[Session]:
    """Open an engine on a checkpoint; its memory is free again afterwards."""
    opened: list[Session] = []
    with LLM(folder, device=str(device), dtype=settings.pop("dtype", "bfloat16"), **settings) as llm:
        opened.append(Session(llm, device))
        yield opened[0]
    opened.clear()
    del llm
    free(device)


def free(device: torch.device) -> None:
    """Give back what nobody holds any more, so that what is opened next finds it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
