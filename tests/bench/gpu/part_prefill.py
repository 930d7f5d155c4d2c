"""Prompts in chunks of the step's budget: FLOP/s of whole steps."""

from __future__ import annotations

import time

from tests.bench.gpu.bench import Bench
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import Limits, prefill_flop
from tests.bench.gpu.loads import random_prompts
from tests.bench.gpu.profiled import profiled
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.session import Session, session
from tests.bench.gpu.shapes import Shape
from tests.bench.gpu.timing import synchronise

RUNS = 3
CHUNKS_OF_LONG = 4


def part(scale: Scale, name: str) -> Part:
    """Return the prefill of one shape."""
    shape, stem, chunk = scale.shape(name), f"prefill-{name}", scale.chunk

    def limit(limits: Limits) -> float:
        return limits.flops / 1e12

    figures = (
        Figure(f"{stem}/fresh", f"prompts of {chunk:,} tokens, one a step", "TFLOP/s", limit, "75 %"),
        Figure(f"{stem}/long", f"a prompt of {CHUNKS_OF_LONG * chunk:,} tokens in chunks", "TFLOP/s", limit, "75 %"),
        Figure(f"{stem}/step", f"a step of {chunk:,} fresh tokens", "ms", higher=False),
    )
    return Part(stem, f"Prefill, {name}", figures, lambda bench: _run(bench, shape, stem))


def _run(bench: Bench, shape: Shape, stem: str) -> None:
    chunk, chunks = bench.scale.chunk, bench.scale.chunks
    longest = CHUNKS_OF_LONG * chunk
    with session(
        bench.folder(shape),
        bench.device,
        max_num_batched_tokens=chunk,
        max_model_len=longest + 16,
        max_num_seqs=chunks,
        enable_prefix_caching=False,
    ) as opened:
        seconds(opened, 2, chunk)  # kernels are compiled and products tuned for this size

        def fresh() -> tuple[list[float], list[float]]:
            times = [seconds(opened, chunks, chunk) / chunks for _ in range(RUNS)]
            if bench.on_gpu:
                bench.note(profiled(opened.device, lambda: seconds(opened, 1, chunk), 1).words)
            return [prefill_flop(shape, chunk) / one / 1e12 for one in times], [1000 * one for one in times]

        def long() -> list[float]:
            return [prefill_flop(shape, longest) / seconds(opened, 1, longest) / 1e12 for _ in range(RUNS)]

        bench.measure(fresh, f"{stem}/fresh", f"{stem}/step")
        bench.measure(long, f"{stem}/long")


def seconds(opened: Session, count: int, length: int) -> float:
    """Return the seconds that `count` new prompts of `length` tokens take, one token drawn for each."""
    opened.add(random_prompts(count, length, opened.llm.info.vocab_size, seed=time.monotonic_ns()), tokens=1)
    synchronise(opened.device)
    began = time.perf_counter()
    while opened.core.has_unfinished:
        opened.core.step()
    synchronise(opened.device)
    return time.perf_counter() - began
