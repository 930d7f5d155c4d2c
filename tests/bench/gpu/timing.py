"""How things are timed: CUDA events around many calls on rotated inputs, after warm-ups; medians of several runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

WARM_UPS = 3
WARM_SECONDS = 0.2  # that a GPU works before it is timed: its clocks rise within less
LEAD_CYCLES = 1_000_000  # half a millisecond that a GPU is kept busy while the host launches what is timed
L2_BYTES = 50 << 20  # of an H100 or H200: inputs rotate through several times as much


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    repeats: int,
    graph: bool = False,
    warm_seconds: float = WARM_SECONDS,
    launches: bool = False,
) -> list[float]:
    """Return `repeats` samples of the seconds that one of `calls` takes, each over all of them in turn.

    calls: the same work on different inputs, so that no cache holds them. graph: replay them as one CUDA graph, so
    that launches take no time of the host; where they cannot be captured the error is raised. warm_seconds: least
    time that a GPU does the same before. launches: begin with the host's launches; else the GPU has other work until
    it has been told what to do.
    """
    run = _captured(calls) if graph and device.type == "cuda" else lambda: [call() for call in calls]
    on_gpu = device.type == "cuda"
    lead = LEAD_CYCLES if on_gpu and not launches else 0
    timed = _by_events if on_gpu else _by_clock
    spent, enough = 0.0, warm_seconds if on_gpu else 0.0
    for _ in range(WARM_UPS):
        spent += timed(run, lead)
    while spent < enough:
        spent += timed(run, lead)
    return [timed(run, lead) / len(calls) for _ in range(repeats)]


def rotations(num_bytes: float) -> int:
    """Return how many sets of inputs of this size it takes for none to be in the cache when its turn comes."""
    return int(min(64, max(2, 4 * L2_BYTES // max(num_bytes, 1))))


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a first call may compile, or allocate what stays
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _by_events(run: Callable[[], object], lead: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if lead:
        torch.cuda._sleep(lead)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _by_clock(run: Callable[[], object], _: int) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
