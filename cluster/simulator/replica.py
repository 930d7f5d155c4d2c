"""A whole replica around a simulated engine: links, sessions, reports and the prefix cache are the real ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cluster.replica.core import ReplicaCore
from cluster.replica.facts import ReplicaFacts, ReplicaTimes
from cluster.simulator.engine import SimulatedEngine
from cluster.simulator.executor import ModelledExecutor
from cluster.simulator.step_time import StepTimes
from engine.config import EngineConfig
from engine.core import EngineCore


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
