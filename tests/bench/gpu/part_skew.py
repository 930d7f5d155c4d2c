"""One long sequence among many short ones: what a step of all of them takes, with it and without."""

from __future__ import annotations

from tests.bench.gpu.bench import Bench, NotHere
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import HALF, Limits, decode_bytes
from tests.bench.gpu.part_decode import BUDGET, FILLING
from tests.bench.gpu.profiled import profiled
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.session import Session, session
from tests.bench.gpu.shapes import Shape


def part(scale: Scale, name: str) -> Part:
    """Return the skewed batch of one shape."""
    shape, stem = scale.shape(name), f"skew-{name}"
    batch, context, long = scale.skew

    def step(limits: Limits, more: int = 0) -> float:
        return 1000 * (decode_bytes(shape, batch, context) + HALF * more * shape.kv_per_token) / limits.bandwidth

    def with_it(limits: Limits) -> float:
        return step(limits, long)

    def longer(limits: Limits) -> float:
        return with_it(limits) / step(limits)

    figures = (
        Figure(f"{stem}/even", f"a step of {batch} sequences of {context:,} tokens", "ms", step, higher=False),
        Figure(f"{stem}/skewed", f"a step with one of {long:,} tokens among them", "ms", with_it, higher=False),
        Figure(f"{stem}/ratio", "how much longer that one makes it", "x", longer, higher=False),
    )
    return Part(stem, f"One long sequence among short ones, {name}", figures, lambda bench: _run(bench, shape, stem))


def _run(bench: Bench, shape: Shape, stem: str) -> None:
    scale = bench.scale
    batch, _, long = scale.skew
    timed = scale.warm + scale.windows * scale.steps + scale.steps
    longest = long + 2 * (FILLING + timed)  # the same for both: graphs are captured for it
    settings = {"max_model_len": longest, "max_num_seqs": batch + 1, "max_num_batched_tokens": BUDGET}
    with session(bench.folder(shape), bench.device, enable_prefix_caching=False, **settings) as opened:
        bench.measure(lambda: _steps(bench, opened, False), f"{stem}/even")
        bench.measure(lambda: _steps(bench, opened, True), f"{stem}/skewed")
    bench.measure(lambda: _ratio(bench, stem), f"{stem}/ratio")


def _steps(bench: Bench, opened: Session, skewed: bool) -> list[float]:
    """Return the milliseconds of steps, the long sequence among them where it is `skewed`."""
    scale = bench.scale
    batch, context, long = scale.skew
    tokens = 2 * FILLING + scale.warm + scale.windows * scale.steps + scale.steps
    running = opened.fill(batch, context - scale.warm - scale.windows * scale.steps // 2, tokens)
    try:
        if skewed:
            running += opened.fill(1, long, tokens)
        found = opened.steady(batch + skewed, scale.warm, scale.windows, scale.steps)
        if bench.on_gpu:
            steps = scale.steps // 2
            bench.note(profiled(opened.device, lambda: opened.skip(steps), steps).words)
    finally:
        opened.clear(running)
    return [1000 * one for one in found.wall]


def _ratio(bench: Bench, stem: str) -> float:
    rows = [bench.results.rows.get(f"{stem}/{what}") for what in ("skewed", "even")]
    values = [row.value for row in rows if row is not None and row.value is not None]
    if len(values) < 2:
        raise NotHere("needs both steps")
    return values[0] / values[1]
