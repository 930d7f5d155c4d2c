"""What the device did in some steps, from torch's profiler: how long it worked, and on which kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.bench.gpu.bench import NotHere
from tests.bench.gpu.timing import synchronise

NAMED = 8  # kernels that are told by name
LONGEST = 60  # characters of a name: templates of C++ go on for hundreds


@dataclass(frozen=True, slots=True)
class Profiled:
    """busy: seconds per step in which at least one kernel or copy ran. kernels: what took most, and its share."""

    busy: float
    kernels: tuple[tuple[str, float], ...]

    @property
    def words(self) -> str:
        """What a row's note says of the kernels."""
        told = ", ".join(f"{name} {100 * share:.1f} %" for name, share in self.kernels)
        return f"of the device's time: {told}" if told else ""


def profiled(device: torch.device, run: Callable[[], object], steps: int) -> Profiled:
    """Return what the device did in `run`, which computes so many steps. Raises `NotHere` without a GPU.

    The profiler slows the host, not the kernels: what is compared with it is the wall time of steps without it.
    """
    if device.type != "cuda":
        raise NotHere("needs a CUDA device")
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    synchronise(device)  # a step that is under way would be recorded beside those that begin here
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        synchronise(device)
    events = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    return Profiled(covered(spans) / 1e6 / steps, top_kernels(events))


def top_kernels(events: Iterable[Any]) -> tuple[tuple[str, float], ...]:
    """Return the kernels that took most of the events' time together, and their shares of it."""
    times: Counter[str] = Counter()
    for event in events:
        times[short(event.name)] += event.time_range.end - event.time_range.start
    total = sum(times.values())
    return tuple((name, spent / total) for name, spent in times.most_common(NAMED) if total)


def short(name: str) -> str:
    """Return a kernel's name without what every one has, cut where it is long."""
    plain = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 1] + "…"


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of what the spans cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
