"""What one rank of a tensor-parallel group does, in the rank's own process."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch
from prometheus_client.core import Metric

from cluster.telemetry.families import FAMILIES
from cluster.telemetry.histogram import Histogram
from cluster.telemetry.samples import Labels, family_of, histogram_of
from engine.telemetry.times import RankTimes

_WAIT, _FORWARD = "rank_channel_wait_seconds", "rank_forward_seconds"


class RankFigures:
    """Fed with the times of every step, on the thread that runs them; `collect` is called on another."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._waited = Histogram(FAMILIES[_WAIT].buckets)
        self._ran = Histogram(FAMILIES[_FORWARD].buckets)

    def note(self, times: RankTimes) -> None:
        """Count one step."""
        self._waited.observe(times.waited)
        self._ran.observe(times.ran)

    def collect(self) -> Iterable[Metric]:
        """Yield the figures of this rank."""
        yield histogram_of(_WAIT, (self._model_name,), self._waited)
        yield histogram_of(_FORWARD, (self._model_name,), self._ran)
        yield memory_metric(self._model_name)


def memory_metric(model_name: str) -> Metric:
    """Return the bytes that this process holds: of the host's memory, and on its GPU where it uses one."""
    held: dict[Labels, float] = {(model_name, "host"): psutil.Process().memory_info().rss}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        held[model_name, "device"] = torch.cuda.memory_reserved()
    return family_of("rank_memory_bytes", held)
