"""Steady decoding: tokens/s, and where the time of a step goes, with steps that overlap and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.gpu.bench import Bench, NotHere
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import Limits, decode_limit
from tests.bench.gpu.profiled import profiled
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.session import Session, session
from tests.bench.gpu.shapes import Shape

AIMS = {
    ("qwen3-0.6b", 1): "65 %",
    ("qwen3-8b", 1): "85 %",
    ("qwen3-0.6b", 256): "80 to 85 %",
    ("qwen3-8b", 256): "80 to 85 %",
}
BUDGET = 8192  # tokens of a step
FILLING = 64  # steps at most in which sequences decode beside others' prompts


def part(scale: Scale, name: str) -> Part:
    """Return the decoding of one shape."""
    shape = scale.shape(name)
    figures = tuple(figure for batch in scale.batches for figure in _figures(scale, shape, batch))
    title = f"Decoding at {scale.context:,} tokens of context, {name}"
    return Part(f"decode-{name}", title, figures, lambda bench: _run(bench, shape))


def _name(shape: Shape, batch: int, what: str) -> str:
    return f"decode-{shape.name}/{batch}/{what}"


def _figures(scale: Scale, shape: Shape, batch: int) -> Iterator[Figure]:
    def limit(limits: Limits) -> float:
        return decode_limit(shape, batch, scale.context, limits)

    def step(limits: Limits) -> float:
        return 1000 * batch / limit(limits)

    def ms(key: str, what: str) -> Figure:
        return Figure(_name(shape, batch, key), f"batch {batch}: {what}", "ms", step, higher=False)

    def percent(key: str, what: str, aim: str = "", higher: bool = False) -> Figure:
        return Figure(_name(shape, batch, key), f"batch {batch}: {what}", "%", aim=aim, higher=higher)

    aim = AIMS.get((shape.name, batch), "")
    yield Figure(_name(shape, batch, "tokens_per_s"), f"batch {batch}", "tokens/s", limit, aim)
    yield ms("step", "a step")
    yield ms("device", "kernels and copies of a step on the device")
    yield percent("idle", "share of a step in which the device is idle", "under 1")
    yield ms("serial_step", "a step with --no-async-scheduling")
    yield percent("serial_idle", "share of it in which the device is idle")
    yield percent("hidden", "share of the host's time that overlapping hides", "100", higher=True)


def _run(bench: Bench, shape: Shape) -> None:
    for overlaps in (True, False):
        settings = {"max_num_seqs": max(bench.scale.batches), "max_num_batched_tokens": BUDGET}
        with session(
            bench.folder(shape),
            bench.device,
            max_model_len=bench.scale.max_model_len,
            enable_prefix_caching=False,
            async_scheduling=overlaps,
            **settings,
        ) as opened:
            for batch in bench.scale.batches:
                (_overlapped if overlaps else _serial)(bench, opened, shape, batch)


def _overlapped(bench: Bench, opened: Session, shape: Shape, batch: int) -> None:
    scale = bench.scale

    def rates() -> tuple[list[float], list[float]]:
        with _decoding(scale, opened, batch):
            steady = opened.steady(batch, scale.warm, scale.windows, scale.steps)
        return steady.rates, [1000 * one for one in steady.wall]

    def device() -> tuple[float, float]:
        before, steps = recorded_steps(scale)
        with _decoding(scale, opened, batch):
            opened.skip(before)
            found = profiled(opened.device, lambda: opened.skip(steps), steps)
        bench.note(found.words)
        busy = 1000 * found.busy
        return busy, idle_share(_measured(bench, shape, batch, "step"), busy)

    bench.measure(rates, *(_name(shape, batch, what) for what in ("tokens_per_s", "step")))
    bench.measure(device, *(_name(shape, batch, what) for what in ("device", "idle")))


def _serial(bench: Bench, opened: Session, shape: Shape, batch: int) -> None:
    scale = bench.scale

    def steps() -> list[float]:
        with _decoding(scale, opened, batch):
            return [1000 * one for one in opened.steady(batch, scale.warm, scale.windows, scale.steps).wall]

    def idle() -> float:
        return idle_share(*(_measured(bench, shape, batch, what) for what in ("serial_step", "device")))

    def hidden() -> float:
        return hidden_share(*(_measured(bench, shape, batch, what) for what in ("serial_step", "step", "device")))

    bench.measure(steps, _name(shape, batch, "serial_step"))
    bench.measure(idle, _name(shape, batch, "serial_idle"))
    bench.measure(hidden, _name(shape, batch, "hidden"))


def _measured(bench: Bench, shape: Shape, batch: int, what: str) -> float:
    row = bench.results.rows.get(_name(shape, batch, what))
    if row is None or row.value is None:
        raise NotHere("needs a CUDA device" if not bench.on_gpu else f"{_name(shape, batch, what)} was not measured")
    return row.value


def idle_share(step: float, busy: float) -> float:
    """Return the percent of a step in which nothing ran on the device."""
    return 100 * (1 - busy / step)


def hidden_share(serial: float, step: float, busy: float) -> float:
    """Return the percent of the host's time, which is what a step without overlap takes longer than the device works,
    that a step with overlap does not take. Raises `NotHere` where there is nothing to hide.
    """
    host = serial - busy
    if host <= 0:
        raise NotHere("a step without overlap took no longer than the device works: nothing to hide was seen")
    return 100 * (serial - step) / host


@contextmanager
def _decoding(scale: Scale, opened: Session, batch: int) -> Iterator[None]:
    """Have `batch` sequences decode in the block."""
    prompt = prompt_length(scale, batch)
    running = opened.fill(batch, prompt, _longest(scale) - prompt)
    try:
        yield
    finally:
        opened.clear(running)


def prompt_length(scale: Scale, batch: int) -> int:
    """Return the tokens of prompts with which the middle of what is timed has `context` tokens.

    While others' prompts are computed, sequences already decode: half of the steps of filling, on average.
    """
    filling = batch * scale.context // BUDGET
    return scale.context - filling // 2 - scale.warm - scale.windows * scale.steps // 2


def recorded_steps(scale: Scale) -> tuple[int, int]:
    """Return how many steps come before those that the profiler records, and how many it records.

    They lie in the middle of those that are timed: at other lengths they would take the device another time.
    """
    steps = scale.steps // 2
    return scale.warm + (scale.windows * scale.steps - steps) // 2, steps


def _longest(scale: Scale) -> int:
    """Tokens of a sequence that is timed."""
    return scale.context + FILLING + scale.warm + (scale.windows + 1) * scale.steps
