"""What it costs two ranks to draw from a vocabulary of 32k, gathered and each from its share: paired, in turns.

`python -m tests.bench.vocab_gather` prints microseconds and bytes per step, over shared memory and over sockets, as
between hosts. Both ranks run on this machine's cores.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.inputs.dummy_steps import dummy_sampling
from engine.layers.embedding import ParallelLMHead
from engine.models.decoder import DecoderLM
from engine.report import SamplingInputs
from engine.sampling.sampler import sample
from engine.sampling.sharded_draw import draw_apart, pack_draws
from parallel.group import Group
from tests.parallel.parallel_ranks import crew

VOCAB = 32_768
HIDDEN = 64  # small: the product is the same with and without
ROWS = (16, 64)
TOP_K = 50
ROUNDS = 100


class Head:
    """As much of a decoder as logits need, with random weights."""

    def __init__(self, group: Group) -> None:
        self.head = ParallelLMHead(HIDDEN, VOCAB, False, group, torch.float32)
        self.head.weight.data.normal_(generator=torch.Generator().manual_seed(group.rank))
        self.group = group
        self.norm = torch.nn.Identity()
        self.vocab_size = VOCAB

    logits, own_logits, _capped = DecoderLM.logits, DecoderLM.own_logits, DecoderLM._capped


def kinds(rows: int) -> dict[str, SamplingInputs]:
    """Return ways of drawing, by name."""
    greedy, free, top = (dummy_sampling(rows) for _ in range(3))
    for sampling in (greedy, free, top):
        sampling.top_p = np.ones(rows, np.float32)
        sampling.seeds = np.arange(rows)
    greedy.temperature = np.zeros(rows, np.float32)
    top.top_k = np.full(rows, TOP_K, np.int32)
    return {"greedy": greedy, "temperature": free, f"top_{TOP_K}": top}


@torch.inference_mode()
def rounds(group: Group) -> dict[str, float]:
    """Run all kinds in turns; returns the microseconds of the quickest round of each."""
    torch.set_num_threads(1)
    head: Any = Head(group)
    figures = {}
    for rows in ROWS:
        hidden = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
        for name, sampling in kinds(rows).items():
            ways = {way.__name__: partial(way, head, hidden, sampling) for way in (gathered, apart)}
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(ROUNDS):
                tokens = []
                for way, act in ways.items():
                    group.barrier()
                    began = time.perf_counter()
                    tokens.append(act())
                    taken[way].append(time.perf_counter() - began)
                assert group.rank or tokens[0] == tokens[1], "drawing apart changed a token"
            for way, each in taken.items():
                figures[f"{name}.rows_{rows}.{way}_us"] = min(each) * 1e6
    return figures


def gathered(head: Any, hidden: Tensor, sampling: SamplingInputs) -> list[int]:
    """Draw from whole rows on rank 0."""
    logits = head.logits(hidden)
    return [] if head.group.rank else sample(logits, sampling).token_ids.tolist()


def apart(head: Any, hidden: Tensor, sampling: SamplingInputs) -> list[int]:
    """Draw as the ranks of a gang do, the driver's packing included."""
    tokens: list[int] = draw_apart(head, hidden, pack_draws(sampling, hidden.device), len(hidden)).tolist()
    return tokens


def check(group: Group) -> None:
    """What the worker ranks run."""
    rounds(group)


def sent_bytes() -> dict[str, float]:
    """Return the bytes that one rank hands to the others for one row of fp32 logits."""
    return {"gathered": VOCAB // 2 * 4, "greedy": 8, "temperature": 8 + 16, f"top_{TOP_K}": 8 + 4 * TOP_K + 16}


def measure() -> dict[str, dict[str, float]]:
    """Return microseconds per step by way of sending, and bytes per row and rank."""
    results: dict[str, dict[str, float]] = {"bytes_per_row": sent_bytes()}
    for name, shared in (("shared_memory", True), ("sockets", False)):
        found: dict[str, float] = {}

        def here(group: Group, found: dict[str, float] = found) -> None:
            found |= rounds(group)

        here.__module__, here.__name__ = __name__ if __name__ != "__main__" else "tests.bench.vocab_gather", "check"
        with crew(2, "memory" if shared else "sockets") as ranks:
            ranks.run(here)
        results[name] = found
    return results


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
