"""Steady decoding: tokens/s, and where the time of a step goes."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.gpu.bench import Bench
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import Limits, decode_limit
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.session import Session, Steady, busy_seconds, session
from tests.bench.gpu.shapes import Shape

BUDGET = 8192  # tokens of a step
FILLING = 64  # steps at most in which sequences decode beside others' prompts
AIMS = {("qwen3-0.6b", 1): "65 %", ("qwen3-8b", 1): "85 %", ("qwen3-0.6b", 256): "80 %", ("qwen3-8b", 256): "85 %"}


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the figures of one batch size."""

    stem: str

    @property
    def all(self) -> tuple[str, ...]:
        """tokens/s, ms of a step, of it on the device, of it on the host; idle share, hidden share."""
        return tuple(f"{self.stem}/{what}" for what in ("tokens_per_s", "step", "device", "host", "idle", "hidden"))


def part(scale: Scale, name: str) -> Part:
    """Return the decoding of one shape."""
    shape, stem = scale.shape(name), f"decode-{name}"
    figures = tuple(figure for batch in scale.batches for figure in _figures(scale, shape, batch))
    return Part(stem, f"Decoding at {scale.context:,} tokens of context, {name}", figures, lambda b: _run(b, shape))


def _figures(scale: Scale, shape: Shape, batch: int) -> tuple[Figure, ...]:
    names = Names(f"decode-{shape.name}/{batch}").all
    aim = AIMS.get((shape.name, batch), "")

    def limit(limits: Limits) -> float:
        return decode_limit(shape, batch, scale.context, limits)

    return (
        Figure(names[0], f"batch {batch}", "tokens/s", limit, aim),
        Figure(names[1], f"batch {batch}: a step", "ms", lambda limits: 1000 * batch / limit(limits), higher=False),
        Figure(names[2], f"batch {batch}: kernels and copies on the device", "ms/step", higher=False),
        Figure(names[3], f"batch {batch}: schedule, prepare, update on the host", "ms/step", higher=False),
        Figure(names[4], f"batch {batch}: GPU idle", "% of a step", aim="under 1 %", higher=False),
        Figure(names[5], f"batch {batch}: host time hidden behind the device", "% of it", aim="all"),
    )


def _run(bench: Bench, shape: Shape) -> None:
    scale = bench.scale
    with session(
        bench.folder(shape),
        bench.device,
        max_model_len=_longest(scale),
        max_num_seqs=max(scale.batches),
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False,
    ) as opened:
        for batch in scale.batches:
            _measure(bench, opened, shape, batch)


def prompt_length(scale: Scale, batch: int) -> int:
    """Return the tokens of prompts with which the middle of what is timed has `context` tokens.

    While others' prompts are computed, sequences already decode: half of the steps of filling, on average.
    """
    filling = batch * scale.context // BUDGET
    return scale.context - filling // 2 - scale.warm - scale.windows * scale.steps // 2


def _longest(scale: Scale) -> int:
    """Tokens of a sequence that is timed twice and looked at by the profiler."""
    return scale.context + FILLING + 2 * (scale.warm + scale.windows * scale.steps) + scale.steps


def _measure(bench: Bench, opened: Session, shape: Shape, batch: int) -> None:
    scale, names = bench.scale, Names(f"decode-{shape.name}/{batch}").all
    seen: list[Steady] = []

    def rates() -> tuple[list[float], list[float], list[float]]:
        seen.append(opened.steady(scale.warm, scale.windows, scale.steps))
        steady = seen[-1]
        return steady.rates, [1000 * one for one in steady.wall], [1000 * one for one in steady.host]

    def shares() -> tuple[float, float, float]:
        steady = seen[-1] if seen else opened.steady(scale.warm, scale.windows, scale.steps)
        return told_shares(steady, busy_seconds(opened, scale.steps // 2))

    prompt = prompt_length(scale, batch)
    running = opened.fill(batch, prompt, _longest(scale) - prompt)
    try:
        bench.measure(rates, names[0], names[1], names[3])
        bench.measure(shares, names[2], names[4], names[5])
    finally:
        opened.clear(running)


def told_shares(steady: Steady, busy: float) -> tuple[float, float, float]:
    """Return ms of the device's work in a step, percent of a step without any, percent of the host's time it hid."""
    wall = sorted(steady.wall)[len(steady.wall) // 2]
    host = sorted(steady.host)[len(steady.host) // 2]
    hidden = min(max(host + busy - wall, 0.0), host) / host if host else 1.0
    return 1000 * busy, 100 * (1 - busy / wall), 100 * hidden
