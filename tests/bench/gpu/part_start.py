"""From nothing to the first token, by phase; sleep and wake."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from engine.sampling_params import SamplingParams
from tests.bench.cold_start import start
from tests.bench.gpu.bench import Bench, NotHere
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.limits import HALF
from tests.bench.gpu.scale import Scale
from tests.bench.gpu.session import session
from tests.bench.gpu.shapes import Shape
from tests.bench.gpu.timing import synchronise

RUNS = 3
GRAPHS = "graphs"  # phase of starting in which they are captured


def part(scale: Scale, name: str) -> Part:
    """Return the start of one shape."""
    shape, stem = scale.shape(name), f"start-{name}"
    figures = (
        Figure(
            f"{stem}/first_token",
            "from the start of the process to the first token",
            "s",
            aim="under 6",
            higher=False,
        ),
        Figure(f"{stem}/imports", "until everything is imported", "s", higher=False),
        Figure(f"{stem}/weights", "weights from the page cache to the device", "GB/s"),
        Figure(f"{stem}/graphs", "capture of graphs", "s", higher=False),
        Figure(f"{stem}/sleep", "sleep: weights to the host, K and V dropped", "s", higher=False),
        Figure(f"{stem}/wake", "wake, until the first token", "s", aim="under 0.5", higher=False),
    )
    return Part(stem, f"Start, sleep and wake, {name}", figures, lambda bench: _run(bench, shape, stem))


def _run(bench: Bench, shape: Shape, stem: str) -> None:
    folder = bench.folder(shape)
    starts: list[dict[str, Any]] = []

    def cold() -> list[list[float]]:
        starts.extend(start(folder, str(bench.device)) for _ in range(RUNS if bench.on_gpu else 1))
        rates = [HALF * shape.stored_weights / one["phases"]["weights"] / 1e9 for one in starts]
        return [[one["first_token"] for one in starts], [one["imports"] for one in starts], rates]

    def graphs() -> list[float]:
        known = starts or [start(folder, str(bench.device))]
        found = [one["phases"][GRAPHS] for one in known if GRAPHS in one["phases"]]
        if not found:
            raise NotHere("no graphs were captured while the engine started")
        return found

    bench.measure(cold, f"{stem}/first_token", f"{stem}/imports", f"{stem}/weights")
    bench.measure(graphs, f"{stem}/graphs")
    bench.measure(lambda: _sleep_and_wake(bench, folder), f"{stem}/sleep", f"{stem}/wake")


def _sleep_and_wake(bench: Bench, folder: Path) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    with session(folder, bench.device, enable_sleep_mode=True, max_model_len=256) as opened:

        def token() -> list[int]:
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            return opened.llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids

        def timed(action: Any, into: list[float]) -> Any:
            synchronise(bench.device)
            began = time.perf_counter()
            found = action()
            synchronise(bench.device)
            into.append(time.perf_counter() - began)
            return found

        before = token()
        for _ in range(RUNS):
            timed(opened.llm.sleep, times[0])
            if timed(lambda: (opened.llm.wake_up(), token())[1], times[1]) != before:
                raise RuntimeError("after sleep and wake the model draws another token")
    return times
