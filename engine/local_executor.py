"""Executors: one rank in this process, alone or as the driver of a gang of workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from typing_extensions import override

from engine.checksums import check_sums, summed_files
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, StepMemoryError
from engine.executor import Executor, Pending
from engine.model_folder import ModelFolder, check_sharding, open_model
from engine.models.spec import DecoderSpec
from engine.parking import give_back
from engine.report import SamplingInputs, StepInputs, StepOutputs
from engine.resolve import resolve, set_threads
from engine.runner import ModelRunner
from engine.sharded_draw import pack_draws
from engine.step_messages import StepWriter
from engine.worker import (
    await_workers,
    device_of,
    join_group,
    open_channel,
    pack_sleep,
    pack_wake,
    run_worker,
)
from parallel.channel import Channel
from parallel.errors import ParallelError, ShardingError
from parallel.group import Group, SoloGroup
from parallel.launcher import launch
from parallel.packing import Buffer
from parallel.rendezvous import Rendezvous
from parallel.ring import SharedMemoryRing

logger = logging.getLogger(__name__)

CPU_ALLOCATOR = "DefaultCPUAllocator"  # named by torch when the system gives it no memory
CHECKSUMS = "checksums"  # phase of starting
LAST_WORDS = 0.5  # seconds for a dying rank's reason to arrive

OnPhase = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What came up: the config with everything resolved, and what the model is.

    num_kv_blocks: null block included. vocab_size: width of the logits. phases: seconds by phase of starting.
    """

    config: EngineConfig
    spec: DecoderSpec
    num_kv_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    attention_backend: str
    phases: dict[str, float]

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit the KV cache."""
        return (self.num_kv_blocks - 1) * self.config.block_size


class Workers(Protocol):
    """The processes of ranks 1 to N-1, whoever started them (`parallel.launcher.Gang`, Ray actors)."""

    def check(self) -> None:
        """Raise with the reason when any rank has ended."""

    def kill(self) -> None:
        """End all ranks at once, hung ones included. Can be called twice."""


class SoloExecutor(Executor):
    """A model on one device, in this process."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner: ModelRunner | None = runner

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        if self._runner is None:
            raise EngineDeadError("the executor is closed")
        with out_of_memory_told():
            return _launched(self._runner, inputs, sampling)

    @override
    def sleep(self, level: int) -> None:
        with out_of_memory_told("sleep"):
            self._awake().sleep(level)

    @override
    def wake(self, tag: str) -> None:
        with out_of_memory_told("waking up"):
            self._awake().wake(tag)

    @override
    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None and runner.group.device.type == "cuda":
            device = runner.group.device
            runner.close()
            del runner
            # What is left holds itself. A device that has failed has nothing to give.
            with suppress(RuntimeError):
                give_back(device)

    def _awake(self) -> ModelRunner:
        if self._runner is None:
            raise EngineDeadError("the executor is closed")
        return self._runner


class GangExecutor(Executor):
    """The driver of a gang: rank 0 in this process tells the workers each step, then runs its own share of it.

    Any error ends the whole gang. Owns `group`, `channel` and `workers`.
    """

    def __init__(self, runner: ModelRunner, group: Group, channel: Channel, workers: Workers) -> None:
        self._runner: ModelRunner | None = runner
        self._group = group
        self._channel = channel
        self._workers = workers
        self._timeout = runner.config.step_timeout
        self._steps = StepWriter(runner.config)
        self._number = 0

    @override
    def launch(self, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
        if self._runner is None:
            raise EngineDeadError("the executor is closed")
        self._number += 1
        with self.broken_told(f"in step {self._number}"):
            inputs.draws = pack_draws(sampling, self._group.device)
            began = time.perf_counter()
            self._channel.send(self._steps.pack(inputs, self._number), self._timeout)
            told = time.perf_counter() - began
            return _GangPending(self, f"in step {self._number}", _launched(self._runner, inputs, sampling), told)

    @override
    def sleep(self, level: int) -> None:
        with self._told(pack_sleep(level), "while it fell asleep") as runner:
            runner.sleep(level)

    @override
    def wake(self, tag: str) -> None:
        with self._told(pack_wake(tag), "while it woke up") as runner:
            runner.wake(tag)

    def check(self) -> None:
        """Raise `EngineDeadError` when a worker has ended. For watchers; any thread."""
        reason = _death(self._workers)
        if reason is not None:
            raise EngineDeadError(reason)

    @override
    def close(self) -> None:
        runner, self._runner = self._runner, None
        # First the workers: a hung one would hold up whoever waits for it to read or to answer.
        self._workers.kill()
        if runner is not None:
            runner.close()
        self._channel.close()
        self._group.close()

    @contextmanager
    def _told(self, order: Buffer, when: str) -> Iterator[ModelRunner]:
        """Tell the other ranks what rank 0 then does as well."""
        if self._runner is None:
            raise EngineDeadError("the executor is closed")
        with self.broken_told(when):
            self._channel.send(order, self._timeout)
            yield self._runner

    @contextmanager
    def broken_told(self, when: str) -> Iterator[None]:
        """End the gang on any error, and say when, and why where a rank knows."""
        try:
            yield
        except ParallelError as error:
            reason = _last_words(self._workers) or str(error)
            self.close()
            raise EngineDeadError(f"the tensor-parallel group broke {when}: {reason}") from error
        except BaseException:
            self.close()  # the ranks are out of step
            raise


class _GangPending(Pending):
    """A step of a gang. told: seconds that telling the other ranks took."""

    def __init__(self, gang: GangExecutor, when: str, pending: Pending, told: float) -> None:
        self._gang = gang
        self._when = when
        self._pending = pending
        self._told = told

    @override
    def result(self) -> StepOutputs:
        with self._gang.broken_told(self._when):
            outputs = self._pending.result()
        outputs.channel = self._told
        return outputs


@contextmanager
def out_of_memory_told(what: str = "the step") -> Iterator[None]:
    """Turn what torch and Python raise when memory runs out into `StepMemoryError`. what: that wanted it."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise StepMemoryError(f"no memory for {what}: {error}") from error
    except RuntimeError as error:
        if CPU_ALLOCATOR not in str(error):  # torch has no type of its own for it
            raise
        raise StepMemoryError(f"no memory for {what}: {error}") from error


def build_executor(config: EngineConfig, on_phase: OnPhase = lambda _: None) -> tuple[Executor, ModelInfo]:
    """Load the model on this machine and return its executor, ready for the first step.

    With `tensor_parallel_size` above 1 the other ranks are started as processes that end with this one. on_phase:
    told each phase of loading as it begins.

    Raises `CheckpointError`, `ConfigError`, or `EngineDeadError` when a rank did not come up.
    """
    folder, config = prepare_model(config, on_phase)
    size = config.tensor_parallel_size
    if size == 1:
        runner = ModelRunner(config, SoloGroup(device_of(config, 0)), folder, on_phase)
        return SoloExecutor(runner), model_info(runner)
    rendezvous = Rendezvous.create()
    ring = SharedMemoryRing.create(readers=size - 1)
    workers = launch(size, run_worker, (config, size, rendezvous.address, ring.name))
    return drive_gang(config, folder, rendezvous, ring, workers, on_phase)


def prepare_model(config: EngineConfig, on_phase: OnPhase = lambda _: None) -> tuple[ModelFolder, EngineConfig]:
    """Read the model's config and check that it can be served so, before any process or weight.

    Where the checkpoint has sums of its files (`engine.checksums`), those are checked: a phase of its own.

    Returns the folder, and the config as all ranks must get it (device and dtype chosen).
    Raises `CheckpointError` or `ConfigError`.
    """
    folder = _checked(open_model(config.model), on_phase)
    full = resolve(config, folder.spec)
    try:
        check_sharding(folder.spec, config.tensor_parallel_size)
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


def drive_gang(
    config: EngineConfig,
    folder: ModelFolder,
    rendezvous: Rendezvous,
    channel: Channel | None,
    workers: Workers,
    on_phase: OnPhase = lambda _: None,
) -> tuple[GangExecutor, ModelInfo]:
    """Be rank 0 of a gang whose workers were started elsewhere with `worker_main`; returns when all are loaded.

    config: from `prepare_model`. channel: the ring whose name the workers got, None where they got none.
    Takes `channel` and `workers` over: on any error they are ended. Raises like `build_executor`.
    """
    group: Group | None = None
    size = config.tensor_parallel_size
    began = time.perf_counter()
    try:
        set_threads(size)
        on_phase("workers")
        await_workers(rendezvous, size, workers.check)
        group = join_group(config, 0, size, rendezvous)
        channel = channel or open_channel(group, rendezvous, None)
        waited = time.perf_counter() - began
        runner = ModelRunner(config, group, folder, on_phase)
    except BaseException as error:
        reason = _last_words(workers) if isinstance(error, ParallelError) else None
        workers.kill()
        for part in (channel, group):
            if part is not None:
                part.close()
        if isinstance(error, ParallelError):
            raise EngineDeadError(f"the tensor-parallel group did not come up: {reason or error}") from error
        raise
    runner.phases = {**folder.phases, "workers": waited, **runner.phases}
    return GangExecutor(runner, group, channel, workers), model_info(runner)


def model_info(runner: ModelRunner) -> ModelInfo:
    """Return what a loaded runner serves."""
    config, spec = runner.config, runner.spec
    info = ModelInfo(
        config=config,
        spec=spec,
        num_kv_blocks=config.num_kv_blocks or 0,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        attention_backend=runner.attention_backend,
        phases=dict(runner.phases),
    )
    logger.info(
        "%s in %s on %s, attention %s, KV cache of %d tokens",
        spec.architecture,
        config.dtype,
        config.device,
        info.attention_backend,
        info.kv_tokens,
    )
    return info


def _launched(runner: ModelRunner, inputs: StepInputs, sampling: SamplingInputs) -> Pending:
    pending = runner.launch(inputs, sampling)
    if pending is None:
        raise RuntimeError("the runner sampled nothing although it was asked to")
    return pending


def _death(workers: Workers) -> str | None:
    try:
        workers.check()
    except (ParallelError, EngineDeadError) as error:
        return str(error)
    return None


def _last_words(workers: Workers) -> str | None:
    """Return why a worker ended. A broken connection is often seen before the death behind it, so wait a little."""
    deadline = time.monotonic() + LAST_WORDS
    while (reason := _death(workers)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return reason
