"""Simulated replicas with routers in front of them, in one process; all but the engine is the real thing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Self

from cluster.replica.core import ReplicaCore
from cluster.replica.sessions import ReplicaFacts, ReplicaTimes
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.simulator.engine import ModelledExecutor, SimulatedEngine, StepTimes
from engine.config import EngineConfig
from engine.core import EngineCore
from tests.simulator.links import connect_local


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """What every simulated replica of one model is. num_kv_blocks: with the null block."""

    num_kv_blocks: int = 4096
    max_model_len: int = 32768
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    vocab_size: int = 32000
    step_times: StepTimes = field(default_factory=StepTimes)


def simulated_replica(
    replica_id: str, model: SimulatedModel, incarnation: int | None = None, times: ReplicaTimes | None = None
) -> ReplicaCore:
    """Return a replica, made and used on the running event loop; its `serve` takes links. Close it in the end."""
    loop = asyncio.get_running_loop()
    config = EngineConfig(
        "simulated",
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        block_size=model.block_size,
    )
    executor = ModelledExecutor(model.step_times, model.vocab_size)
    core = EngineCore(config, executor, (0,), model.vocab_size, model.num_kv_blocks, clock=loop.time)
    facts = ReplicaFacts(
        replica_id,
        "simulated",
        model.max_model_len,
        model.vocab_size,
        model.block_size,
        model.num_kv_blocks - 1,
    )
    return ReplicaCore(
        core,
        facts,
        times,
        incarnation=incarnation,
        engine=lambda core, loop, listener: SimulatedEngine(core, loop, listener, lambda: executor.last_step),
        clock=loop.time,
    )


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
