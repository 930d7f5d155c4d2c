"""Simulated replicas with routers in front of them, in one process."""

from __future__ import annotations

from random import Random
from types import TracebackType
from typing import Self

from cluster.replica.core import ReplicaCore
from cluster.router.dispatch_config import DispatcherConfig
from cluster.router.dispatcher import Dispatcher
from cluster.simulator.replica import SimulatedModel, simulated_replica
from cluster.wire.local import connect_local


class SimulatedCluster:
    """Made and left as a context: `async with SimulatedCluster(4, model) as cluster`.

    routers: dispatchers, each with a link to every replica. seed: of what the routers draw at random.
    """

    def __init__(
        self,
        num_replicas: int,
        model: SimulatedModel,
        config: DispatcherConfig | None = None,
        num_routers: int = 1,
        seed: int = 0,
    ) -> None:
        self.replicas: dict[str, ReplicaCore] = {}
        self.routers: list[Dispatcher] = []
        self._num_replicas = num_replicas
        self._model = model
        self._config = config
        self._seeds = range(seed, seed + num_routers)

    async def __aenter__(self) -> Self:
        self.routers = [Dispatcher(self._config, Random(seed)) for seed in self._seeds]
        for i in range(self._num_replicas):
            name = f"replica-{i:03}"
            self.replicas[name] = simulated_replica(name, self._model, incarnation=i + 1)
            for number, router in enumerate(self.routers):
                router.add_link(await connect_local(self.replicas[name].serve, f"router-{number}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for router in self.routers:
            await router.close()
        for replica in self.replicas.values():
            await replica.close()
