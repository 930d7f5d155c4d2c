"""From a config to an executor that is ready for its first step, with the other ranks' processes where it has any."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError
from engine.loader.checkpoint import ModelFolder, check_sums, open_model, summed_files
from engine.models.config import ModelConfig
from engine.resolve import check_model, resolve
from engine.threads import ThreadShare
from engine.worker.executor import Executor
from engine.worker.local_executor import SoloExecutor, WorkerGroupExecutor, Workers, exit_reason
from engine.worker.runner import ModelRunner, OnPhase, no_phases
from engine.worker.worker import await_workers, device_of, join_group, open_channel, run_worker
from parallel.channel import Channel
from parallel.errors import ParallelError, ShardingError
from parallel.group import Group, SoloGroup
from parallel.launcher import launch
from parallel.message_ring import SharedMemoryRing
from parallel.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

CHECKSUMS = "checksums"  # phase of starting


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What came up: the config with everything resolved, and what the model is.

    num_kv_blocks: null block included. vocab_size: width of the logits. phases: seconds by phase of starting.
    arithmetic: what decides the last bits of the logits, by name.
    """

    config: EngineConfig
    model: ModelConfig
    num_kv_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    attention_backend: str
    phases: dict[str, float]
    arithmetic: Mapping[str, str] = field(default_factory=dict)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit the KV cache."""
        return (self.num_kv_blocks - 1) * self.config.block_size

    @property
    def words(self) -> str:
        """What serves, in a line: architecture, whose layers, types, how attention is computed."""
        half = f" (text half of {self.model.text_half_of})" if self.model.text_half_of else ""
        parts = [self.model.architecture + half, self.config.dtype, f"attention {self.attention_backend}"]
        if self.arithmetic.get("layers") == "TransformersModel":
            parts.insert(1, "transformers' layers")
        if self.config.weight_form is not None:
            parts.append(f"weights {self.config.weight_form}")
        if self.config.fp8_cache:
            parts.append("KV cache fp8")
        return ", ".join(parts)


def build_executor(config: EngineConfig, on_phase: OnPhase = no_phases) -> tuple[Executor, ModelInfo]:
    """Load the model on this machine and return its executor, ready for the first step.

    With `tensor_parallel_size` above 1 the other ranks are started as processes that end with this one. on_phase:
    called with each phase of loading as it begins, and as `OnPhase` says.

    Raises `CheckpointError`, `ConfigError`, or `EngineDeadError` when a rank did not come up.
    """
    folder, config = prepare_model(config, on_phase)
    size = config.tensor_parallel_size
    if size == 1:
        return _run_alone(config, folder, on_phase)
    _check_gpus(config)
    rendezvous = Rendezvous.create()
    ring = SharedMemoryRing.create(readers=size - 1)
    workers = launch(size, run_worker, (config, size, rendezvous.address, ring.name))
    return drive_worker_group(config, folder, rendezvous, ring, workers, on_phase)


def _run_alone(config: EngineConfig, folder: ModelFolder, on_phase: OnPhase) -> tuple[SoloExecutor, ModelInfo]:
    threads = ThreadShare(1, config)
    try:
        with threads.bound():
            runner = ModelRunner(config, SoloGroup(device_of(config, 0)), folder, on_phase)
    except BaseException:
        threads.give_back()
        raise
    return SoloExecutor(runner, threads), model_info(runner)


def _check_gpus(config: EngineConfig) -> None:
    """Raise `ConfigError` where ranks on this machine would share a GPU, over which NCCL does not work."""
    device, size = config.device or "cpu", config.tensor_parallel_size
    if device.startswith("cuda:"):
        raise ConfigError(
            f"device={device} is one GPU, and tensor_parallel_size={size} needs {size}; use device=cuda", "device"
        )
    count = torch.cuda.device_count() if device == "cuda" else size
    if count < size:
        raise ConfigError(
            f"tensor_parallel_size={size} needs a GPU for each rank, and torch sees {count}; use at most {count}",
            "tensor_parallel_size",
        )


def prepare_model(config: EngineConfig, on_phase: OnPhase = no_phases) -> tuple[ModelFolder, EngineConfig]:
    """Read the model's config and check that it can be served so, before any process or weight.

    Where the checkpoint has sums of its files (`engine.loader.checkpoint`), those are checked: a phase of its own.

    Returns the folder, and the config as all ranks must get it (device and dtype chosen).
    Raises `CheckpointError` or `ConfigError`.
    """
    folder = _checked(open_model(config.source, impl=config.model_impl, overrides=config.hf_overrides), on_phase)
    full = resolve(config, folder.config)
    try:
        check_model(full, folder.config)
    except ShardingError as error:
        raise ConfigError(f"tensor_parallel_size does not fit the model: {error}", "tensor_parallel_size") from error
    return folder, config.resolved(device=full.device, dtype=full.dtype)


def _checked(folder: ModelFolder, on_phase: OnPhase) -> ModelFolder:
    """Return the folder with the seconds that its sums took, if it has any. Raises `CheckpointError`."""
    sums = summed_files(folder.path)
    if not sums:
        return folder
    on_phase(CHECKSUMS)
    began = time.perf_counter()
    check_sums(folder.path, sums)
    return replace(folder, phases={CHECKSUMS: time.perf_counter() - began})


def drive_worker_group(
    config: EngineConfig,
    folder: ModelFolder,
    rendezvous: Rendezvous,
    channel: Channel | None,
    workers: Workers,
    on_phase: OnPhase = no_phases,
) -> tuple[WorkerGroupExecutor, ModelInfo]:
    """Be rank 0 of a group whose workers were started elsewhere with `worker_main`; returns when all are loaded.

    config: from `prepare_model`. channel: the ring whose name the workers got, None where they got none.
    Takes `channel` and `workers` over: on any error they are ended. Raises like `build_executor`.
    """
    group: Group | None = None
    size = config.tensor_parallel_size
    began = time.perf_counter()
    threads = ThreadShare(size, config)
    try:
        on_phase("workers")
        await_workers(rendezvous, size, workers.check)
        group = join_group(config, 0, size, rendezvous)
        channel = channel or open_channel(group, rendezvous, None)
        waited = time.perf_counter() - began
        with threads.bound():
            runner = ModelRunner(config, group, folder, on_phase)
    except BaseException as error:
        reason = exit_reason(workers) if isinstance(error, ParallelError) else None
        workers.kill()
        for part in (channel, group):
            if part is not None:
                part.close()
        threads.give_back()
        if isinstance(error, ParallelError):
            raise EngineDeadError(f"the tensor-parallel group did not come up: {reason or error}") from error
        raise
    runner.phases = {**folder.phases, "workers": waited, **runner.phases}
    return WorkerGroupExecutor(runner, group, channel, workers, threads), model_info(runner)


def model_info(runner: ModelRunner) -> ModelInfo:
    """Return what a loaded runner serves."""
    config, model = runner.config, runner.model_config
    info = ModelInfo(
        config=config,
        model=model,
        num_kv_blocks=config.num_kv_blocks or 0,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        attention_backend=runner.attention_backend,
        phases=dict(runner.phases),
        arithmetic=runner.arithmetic,
    )
    logger.info("arithmetic: %s", "; ".join(f"{name} {value}" for name, value in info.arithmetic.items()))
    logger.info("%s on %s, KV cache of %d tokens", info.words, config.device, info.kv_tokens)
    return info
