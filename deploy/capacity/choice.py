"""`squadron plan --gpu auto`: the GPUs that bear a load at the least cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from deploy.capacity.fit import GpuFit, Measured, fit
from deploy.capacity.gpus import GPUS, Gpu, gpu_named
from deploy.capacity.load import ExpectedLoad, ServiceEstimate, Wanted, serve_load
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from parallel.errors import ShardingError

AUTO = "auto"
RANKS = (1, 2, 4, 8)  # that are tried
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """What GPUs there are, and what one of a kind costs an hour, by its name, in any one currency.

    hourly: empty = nobody said. per_node: GPUs of a node; None = as many as the vendor's own boards have.

    Raises `ConfigError` naming the flag.
    """

    hourly: Mapping[str, float] = field(default_factory=dict)
    per_node: int | None = None

    def __post_init__(self) -> None:
        if self.per_node is not None and self.per_node < 1:
            raise ConfigError(f"gpus_per_node must be at least 1, not {self.per_node}", "gpus_per_node")

    @classmethod
    def parse(cls, text: str | None, per_node: int | None = None) -> Prices:
        """Return prices written as `H100=2.5,L4=0.7`. Raises `ConfigError`."""
        found: dict[str, float] = {}
        for part in [] if text is None else text.split(","):
            name, equals, value = part.partition("=")
            if not equals:
                raise ConfigError(f"gpu_prices: {part.strip()!r} is no price; write H100=2.5,L4=0.7", "gpu_prices")
            try:
                price = float(value)
            except ValueError:
                price = math.nan
            if not 0 < price < math.inf:
                raise ConfigError(
                    f"gpu_prices: {value.strip()!r} of {name.strip()} must be a number above 0, such as 2.5",
                    "gpu_prices",
                )
            try:
                gpu = gpu_named(name.strip())
            except ConfigError as error:
                raise ConfigError(f"gpu_prices{str(error).removeprefix('gpu')}", "gpu_prices") from None
            if gpu.name in found:
                raise ConfigError(
                    f"gpu_prices: {gpu.name} has two prices, {found[gpu.name]:g} and {price:g}; leave one",
                    "gpu_prices",
                )
            found[gpu.name] = price
        return cls(found, per_node)

    def on_nodes(self, gpu: Gpu) -> Gpu:
        """Return a GPU as the nodes have it."""
        return gpu if self.per_node is None else replace(gpu, link=gpu.link.within_nodes(self.per_node))

    @property
    def gpus(self) -> list[Gpu]:
        """The GPUs to compare: those that have a price, or all."""
        return [self.on_nodes(gpu) for gpu in ([GPUS[name] for name in self.hourly] or GPUS.values())]

    def of(self, gpu: Gpu) -> float:
        """Return what one costs: its price an hour, or its memory in GB where nobody gave prices."""
        return self.hourly[gpu.name] if self.hourly else gpu.memory

    def measure(self, load: ExpectedLoad) -> str:
        """Return in words what `Candidate.cost` is."""
        if self.hourly:
            return "price an hour" if load.rps else "price of a million output tokens"
        return "GB of GPU memory" if load.rps else "GB of GPU memory for 1,000 output tokens/s"


NO_PRICES = Prices()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind of GPU that bears the load. cost: as `Prices.measure` says."""

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
    config: EngineConfig, model: ModelConfig, wanted: Wanted, prices: Prices, ranks: Collection[int] = RANKS
) -> list[Candidate]:
    """Return the best way to bear the load on each kind of GPU that can, the cheapest first.

    ranks: of a group, that are tried; groups over several hosts are not.

    Raises `ConfigError` where none can, with what keeps the largest of them.
    """
    measure = Measured()
    found, refusals = [], {}
    for gpu in prices.gpus:
        ways = []
        for asked in _groups(config, gpu, ranks):
            try:
                held = fit(asked, model, gpu, measure)
                load = wanted.within(held.config.context_len)
                service = serve_load(held, load)
            except (ConfigError, ShardingError) as error:
                refusals[gpu.name] = str(error)
                continue
            ways.append(Candidate(held, load, service, cost_of(held, load, service, prices)))
        if ways:
            found.append(min(ways, key=lambda way: (way.cost, way.gpus)))
    if not found:
        largest = max(prices.gpus, key=lambda gpu: (gpu.name in refusals, gpu.memory * gpu.bandwidth))
        why = refusals.get(largest.name, "no group of that size is joined on one host")
        raise ConfigError(f"gpu=auto: no GPU that is compared bears it; on {largest.name}: {why}", "gpu")
    return sorted(found, key=lambda way: (way.cost, way.gpus))


def _groups(config: EngineConfig, gpu: Gpu, ranks: Collection[int]) -> Iterator[EngineConfig]:
    for size in ranks:
        if size == 1 or not gpu.link.for_ranks(size).network:
            yield replace(config, tensor_parallel_size=size)


def cost_of(held: GpuFit, load: ExpectedLoad, service: ServiceEstimate, prices: Prices) -> float:
    """Return what a deployment costs, as `prices.measure` says."""
    of_replica = held.config.tensor_parallel_size * prices.of(held.gpu)
    if service.replicas is not None:
        return of_replica * service.replicas
    tokens = service.peak.rps * load.output_len  # a second
    return of_replica / 3600 / tokens * MILLION if prices.hourly else of_replica / tokens * 1000
