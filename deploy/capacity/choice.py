"""`squadron plan --gpu auto`: the GPUs that bear a load with the least memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from deploy.capacity.fit import GpuFit, Measured, fit
from deploy.capacity.gpus import Gpu
from deploy.capacity.load import ExpectedLoad, ServiceEstimate, Wanted, serve_load
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from parallel.errors import ShardingError

AUTO = "auto"
RANKS = (1, 2, 4, 8)  # that are tried


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind of GPU that bears the load. cost: GB of all its GPUs; without a rate, for 1,000 output tokens/s."""

    fit: GpuFit
    load: ExpectedLoad
    service: ServiceEstimate
    cost: float

    @property
    def ranks(self) -> int:
        """GPUs of a replica."""
        return self.fit.config.tensor_parallel_size

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.ranks * (self.service.replicas or 1)


def choose(
    config: EngineConfig, model: ModelConfig, wanted: Wanted, gpus: Collection[Gpu], ranks: Collection[int] = RANKS
) -> list[Candidate]:
    """Return the best way to bear the load on each kind of GPU that can, the one with the least memory first.

    ranks: of a group, that are tried; groups over several hosts are not.

    Raises `ConfigError` where none can, with what keeps the largest of them.
    """
    measured = Measured()
    found, refusals = [], {}
    for gpu in gpus:
        ways = []
        for asked in _groups(config, gpu, ranks):
            try:
                held = fit(asked, model, gpu, measured)
                load = wanted.within(held.config.context_len)
                service = serve_load(held, load)
            except (ConfigError, ShardingError) as error:
                refusals[gpu.name] = str(error)
                continue
            ways.append(Candidate(held, load, service, _cost(held, load, service)))
        if ways:
            found.append(min(ways, key=lambda way: (way.cost, way.gpus)))
    if not found:
        largest = max(gpus, key=lambda gpu: (gpu.name in refusals, gpu.memory * gpu.bandwidth))
        why = refusals.get(largest.name, "no group of that size is joined on one host")
        raise ConfigError(f"gpu=auto: no GPU that is compared bears it; on {largest.name}: {why}", "gpu")
    return sorted(found, key=lambda way: (way.cost, way.gpus))


def _groups(config: EngineConfig, gpu: Gpu, ranks: Collection[int]) -> Iterator[EngineConfig]:
    for size in ranks:
        if size == 1 or not gpu.link.for_ranks(size).network:
            yield replace(config, tensor_parallel_size=size)


def _cost(held: GpuFit, load: ExpectedLoad, service: ServiceEstimate) -> float:
    of_replica = held.config.tensor_parallel_size * held.gpu.memory
    if service.replicas is not None:
        return of_replica * service.replicas
    return of_replica / (service.peak.rps * load.output_len) * 1000
