"""Runs one rank's share of the model: inputs to the device, cache, forward pass, sampling on rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.attention.select import select_for_layers
from engine.config import EngineConfig
from engine.device.gpu import CudaCopies, current, on_own_device
from engine.device.host_memory import give_back, weights_apart
from engine.errors import CheckpointError, ConfigError
from engine.inputs.block_table import RankTable
from engine.inputs.dummy_steps import dummy_decode, dummy_sampling, dummy_step, fullest_sampling
from engine.inputs.step_buffers import NOT_MIXED, MixedShape, StepBuffers
from engine.inputs.token_feedback import TokenFeedback
from engine.kernels.base import Kernels, TorchKernels
from engine.kernels.select import select_draws, select_kernels
from engine.kv.cache import KVCache, cuda_budget
from engine.kv.cache_size import cpu_budget, fit_cache, fit_states, given_budget
from engine.kv.cache_specs import block_bytes, state_bytes
from engine.layers.attention import attention_specs
from engine.loader.checkpoint import ModelFolder, open_model
from engine.loader.fingerprint import (
    refuse_other_settings,
    replica_fingerprint,
    vocabulary_fingerprint,
    weights_fingerprint,
)
from engine.loader.kv_scales import read_kv_scales
from engine.loader.weights import load_model
from engine.models.causal_lm import CausalLM
from engine.quantization.select import choose_products, hold_in_int8, quantization_of
from engine.report import Ints, SamplingInputs, StepInputs, StepOutputs
from engine.resolve import resolve
from engine.sampling.device_rules import DeviceRules
from engine.sampling.sampler import DeviceOutputs
from engine.sampling.sharded_draw import draw_apart
from engine.worker.executor import Pending
from engine.worker.forward import Forward, Passed, logit_rows
from engine.worker.graph_pool import CudaGraphDevice, GraphPool
from engine.worker.graph_sizes import graph_sizes, mixed_sizes
from engine.worker.invariance import arithmetic_of, check_invariance, fix_products
from engine.worker.offload import OffloadedWeights, tensors_of
from engine.worker.sleep import KV_CACHE
from engine.worker.step_outputs import HostSide, outputs_of
from parallel.group import Group

logger = logging.getLogger(__name__)

WEIGHTS = "weights"  # the phase of which a share is told
WARM_UP_TOKENS = 32
WARM_UP_CONTEXTS = (1, 1024)  # tokens; attention takes the keys of the first in one piece, of the second in several
START_TIMEOUT = 300.0  # seconds that ranks wait for each other while they start and load


class OnPhase(Protocol):
    """Called with each phase of starting as it begins; and with a share of it, 0 to 1, whenever that is known."""

    def __call__(self, name: str, share: float | None = None, /) -> None:
        """Take in the phase."""


def no_phases(name: str, share: float | None = None, /) -> None:
    """Tell nobody."""


class ModelRunner:
    """One rank's model and its part of the KV cache. Used by one thread; all ranks must make the same calls.

    config: resolved, `num_kv_blocks` included. phases: seconds spent per phase of starting. on_phase: called with
    each phase as it begins.

    Raises `CheckpointError`, `ConfigError` or `ShardingError` naming what is wrong.
    """

    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        folder: ModelFolder | None = None,
        on_phase: OnPhase = no_phases,
    ) -> None:
        self._on_phase = on_phase
        folder = folder or open_model(config.source, impl=config.model_impl, overrides=config.hf_overrides)
        shrink = config.max_model_len is None
        config = resolve(config, folder.config)
        check_invariance(config, group)
        self.group = group
        self._host_side = HostSide(group.device)
        self._carry = TokenFeedback(group)
        self._rules = DeviceRules()
        self._draws = None if config.attention_backend == "reference" else select_draws(group.device)
        self.phases: dict[str, float] = dict(folder.phases)
        self._folder = folder
        self._offloads = group.device.type == "cuda"  # a CPU has its weights on the host already
        self._offloaded = OffloadedWeights(pinned=self._offloads)
        self._level = 0  # of sleep
        self.model_config = folder.config
        self._vocabulary = vocabulary_fingerprint(str(folder.path), config.tokenizer)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.config = config
        self.block_table = RankTable.of(config)
        self._logit_rows = logit_rows(config, self.model_config.vocab_size)
        with current(group.device):
            self._start(shrink)

    def _start(self, shrink: bool) -> None:
        """Load, measure, allocate, warm up. shrink: whether a context that does not fit may be made shorter."""
        with self._phase(WEIGHTS):
            self.model: CausalLM = self._load()
            self._meet(self._weights)
        self._attention = self._backend(self.config)
        self._kv_scales = read_kv_scales(self._folder.path, self.model) if self.config.fp8_cache else ()
        self._cache = self._allocate(1)
        self._forward = self._assemble()
        with self._phase("kv blocks"):
            self.config = self._fit_cache(shrink)
            self._cache = self._allocate(self.config.num_kv_blocks or 0)
            self._forward.use_cache(self._cache)
        with self._phase("warm-up"):
            self._warm_up(min(WARM_UP_TOKENS, self.config.token_budget), 1)
        if self._forward.pools:
            with self._phase("graphs"):
                self._capture(self._forward.pools)

    def execute(self, inputs: StepInputs, sampling: SamplingInputs | None = None) -> StepOutputs | None:
        """Run one step; returns the tokens where `sampling` is given (rank 0), None elsewhere."""
        pending = self.launch(inputs, sampling)
        return None if pending is None else pending.result()

    @on_own_device
    @torch.inference_mode()
    def launch(self, inputs: StepInputs, sampling: SamplingInputs | None = None) -> Pending | None:
        """Let the device run one step; returns the way to its results where `sampling` is given, None elsewhere."""
        passed = self._forward.run(inputs)
        outputs = self._draw(passed, inputs.draws, sampling)
        if outputs is None:
            return None
        if len(inputs.pooled):
            outputs.pooled = passed.pooled
        self._carry.keep(outputs.token_ids)
        return self._host_side.fetch(outputs)

    def _draw(self, passed: Passed, draws: Ints, sampling: SamplingInputs | None) -> DeviceOutputs | None:
        """Draw from the logits of all wanted rows: the rank with `sampling`, or with `draws` all together."""
        head, rows = passed.head, passed.rows
        if len(draws):
            tokens = draw_apart(head, rows, draws, self._logit_rows, self._draws)
            return None if sampling is None else DeviceOutputs(tokens)
        pieces = (head.logits(piece) for piece in rows.split(self._logit_rows)) if len(rows) else iter(())
        if sampling is not None:
            self._rules.logs = None if sampling.histories is None else passed.logs
            return outputs_of(pieces, sampling, self._draws, self._rules)
        for _ in pieces:
            pass
        return None

    @on_own_device
    def sleep(self, level: int) -> None:
        """Give back the memory of KV cache and weights; see `Executor.sleep`. On a CPU level 1 leaves the weights.

        Returns when all ranks have.
        """
        self._forward.drop_graphs()
        if level == 2:
            del self.model
        elif self._offloads:
            self._offloaded.offload(tensors_of(self.model))
        del self._forward
        self._cache.drop()
        self._rules = DeviceRules()
        give_back(self.group.device)
        self._level = level
        self._meet()

    @on_own_device
    def wake(self, tag: str) -> None:
        """Take the memory of one of `sleep.TAGS` again, as `Executor.wake` says; returns when all ranks have.

        Graphs are captured anew by the steps that want them.
        """
        if tag == KV_CACHE:
            self._cache.restore()
        else:
            if self._level == 2:
                refuse_other_settings(self._folder.path, self.model_config.raw, self._vocabulary, self.config)
                self.model = self._load()
                read = read_kv_scales(self._folder.path, self.model) if self._kv_scales else ()
                for mine, scale in zip(self._kv_scales, read, strict=True):
                    if mine is not None and scale is not None:
                        mine.copy_(scale)
            else:
                self._offloaded.restore()
            self._forward = self._assemble()
        self._meet(self._weights)

    def close(self) -> None:
        """Let go of the graphs; call before the group is closed, as NCCL waits for those that hold its kernels."""
        if hasattr(self, "_forward"):  # it is not there while the engine sleeps
            self._forward.drop_graphs()

    @property
    def attention_backend(self) -> str:
        """Name of the attention backend."""
        return self._attention.name

    @property
    def sampling_backend(self) -> str:
        """Name of what draws tokens."""
        return "torch" if self._draws is None else type(self._draws).__name__

    @property
    def arithmetic(self) -> Mapping[str, str]:
        """What decides the last bits of the logits, by name, as the model is loaded now."""
        return arithmetic_of(self.config, self.model, self.group, self.attention_backend, self.sampling_backend)

    @property
    def fingerprint(self) -> str:
        """Of the weights that are loaded now, and of what is made of them."""
        return replica_fingerprint(self._weights, self.arithmetic)

    def _load(self) -> CausalLM:
        """Read the weights, take note of which they are, and choose how they are computed with."""
        self._weights = weights_fingerprint(self._folder.path, self.config)
        made = quantization_of(self.config, self.model_config.quantization)
        with weights_apart():
            model = load_model(
                self._folder,
                self.config.context_len,
                self.group,
                self.dtype,
                made,
                expert_parallel=self.config.enable_expert_parallel,
                told=partial(self._on_phase, WEIGHTS),
            )
            model.use_kernels(self._kernels)
            if self.config.quantize_lm_head:
                hold_in_int8(model.head)
            choose_products(model, model.kernels)
        if weights_fingerprint(self._folder.path, self.config) != self._weights:
            raise CheckpointError(f"{self._folder.path} was changed while its weights were read; try again")
        if self.config.batch_invariant and self.group.device.type == "cuda":
            fix_products(model)
        return model

    def _kernels(self, head_dim: int) -> Kernels:
        """Return what layers with heads of this size compute with."""
        torch_only = self.config.attention_backend == "reference"
        return TorchKernels() if torch_only else select_kernels(head_dim, self.dtype, self.group.device)

    def _assemble(self) -> Forward:
        """Return what runs the model over the cache, in graphs where the device can."""
        forward = Forward(self.model, self._attention, self._cache, self._carry, self._buffers())
        if self.group.device.type == "cuda" and self.model.supports_graphs:
            sizes, mixed, config = graph_sizes(self.config), mixed_sizes(self.config), self.config
            device = CudaGraphDevice(self.group.device)
            forward.use_graphs(device, sizes, config.context_len, mixed, config.max_num_seqs)
        return forward

    def _meet(self, weights: str = "") -> None:
        """Wait for all ranks with the patience that loading needs; the collectives' own deadline is a step's.

        Raises `CheckpointError` on every rank where they did not read the same `weights`: nodes may have their own.
        """
        group, number = self.group, int(weights[:15] or "0", 16)
        mine = [torch.full((1,), number, device=group.device) for _ in range(group.size)]
        said = [group.broadcast(one, rank, timeout=START_TIMEOUT) for rank, one in enumerate(mine)]
        if any(rank != group.rank and int(one) != number for rank, one in enumerate(said)):
            raise CheckpointError(f"{self._folder.path} holds other weights on another rank's node; copy one to all")

    def _backend(self, config: EngineConfig) -> AttentionBackend:
        specs, kinds = attention_specs(self.model.cached, config, self.group.device)
        return select_for_layers(config.attention_backend, specs, kinds)

    @property
    def _no_memory(self) -> tuple[type[Exception], ...]:
        """What torch raises for more bytes than there are; on a CPU also for more than it can count."""
        on_gpu = self.group.device.type == "cuda"
        return (torch.OutOfMemoryError,) if on_gpu else (MemoryError, RuntimeError)

    def _allocate(self, num_blocks: int) -> KVCache:
        """Return a cache of so many blocks, and of as many states as there are sequences and snapshots."""
        specs, config = self.model.cache_specs(self._attention.spec.cache_dtype), self.config
        snapshots = config.num_state_snapshots
        states = 1 if snapshots is None else config.max_num_seqs + snapshots + 1
        try:
            return KVCache(specs, num_blocks, config.block_size, self.group.device, self._kv_scales, states)
        except self._no_memory as error:
            taken = num_blocks * block_bytes(specs, config.block_size)
            raise ConfigError(
                f"the KV cache of num_kv_blocks={num_blocks} takes {taken} bytes, which {self.group.device} does not "
                f"give ({str(error).partition(chr(10))[0]}); lower num_kv_blocks, kv_cache_memory_bytes or "
                "gpu_memory_utilization",
                "num_kv_blocks",
            ) from error

    def _fit_cache(self, shrink: bool) -> EngineConfig:
        """Return the config with `num_kv_blocks`: as set, or what the rank with the least memory holds."""
        config = self.config
        specs = self.model.cache_specs(self._attention.spec.cache_dtype)
        size, state = block_bytes(specs, config.block_size), state_bytes(specs)
        if config.num_kv_blocks is not None:
            return fit_states(config, state, None)[0]
        room = self._cuda_budget(config) if self.group.device.type == "cuda" else cpu_budget(config)
        mine = torch.tensor([room], dtype=torch.int64, device=self.group.device)
        least = given_budget(config, int(self.group.all_gather(mine, dim=0).min()))
        config, taken = fit_states(config, state, least)
        return fit_cache(config, (least - taken) // size, size, shrink)

    def _cuda_budget(self, config: EngineConfig) -> int:
        """Return the bytes left for the cache, measured with a cache of the null block alone."""
        device = self.group.device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self._warm_up(config.token_budget, config.max_num_seqs)
        torch.cuda.synchronize(device)
        stats = torch.cuda.memory_stats(device)
        graphs = self._forward.estimate_graphs()
        torch.cuda.empty_cache()
        peak, current = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
        return cuda_budget(config, device, peak, current) - graphs

    @torch.inference_mode()
    def _capture(self, pools: tuple[GraphPool, ...]) -> None:
        for pool in pools:
            pool.capture_at_start()
        if self.group.device.type == "cuda":
            torch.cuda.empty_cache()  # what the runs before the recordings took is their stream's: no step finds it
        sizes, mixed = pools[0].captured, [size for pool in pools[1:] for size in pool.captured]
        if sizes:
            figures = (len(sizes), sizes[-1], pools[0].bytes_taken / (1 << 20), len(pools[0].sizes.sizes))
            logger.info(
                "CUDA graphs: %d batch sizes up to %d captured, %.0f MiB; of %d, the rest when needed", *figures
            )
        if mixed:
            logger.info("CUDA graphs of steps with prompts: up to %d tokens, padded to one of %s", max(mixed), mixed)

    def _buffers(self) -> StepBuffers | None:
        """Return where the device gets its inputs; a CPU reads them where they are."""
        device, tokens = self.group.device, self.config.token_budget
        if device.type != "cuda":
            return None
        return StepBuffers(tokens, self.block_table, device, CudaCopies(), self._largest_mixed())

    def _largest_mixed(self) -> MixedShape:
        """Return the most that a mixed step is padded to."""
        tokens = mixed_sizes(self.config).largest if self._attention.supports_mixed_graphs else 0
        if not tokens:
            return NOT_MIXED
        rows = min(tokens, self.config.max_num_seqs)
        return MixedShape(tokens, rows, self._attention.mixed_plan_size(tokens, rows))

    def _warm_up(self, num_tokens: int, num_seqs: int) -> None:
        """Run steps in the null block, so that no request waits for what is made, or compiled, at its first use."""
        step = dummy_step(num_tokens, num_seqs, self.config.context_len, self.config.block_size)
        # With all that a step may be asked for: its memory is measured, its kernels are made.
        sampling = fullest_sampling(step, self._logit_rows, self.model_config.vocab_size)
        self.execute(step, sampling if self.group.rank == 0 else None)
        if self.group.device.type == "cuda":
            # With no more than a filter: what draws from logits as they come, not from a copy in fp32.
            plain = dummy_step(1, 1, 1, self.config.block_size)
            self.execute(plain, dummy_sampling(1) if self.group.rank == 0 else None)
            for length in WARM_UP_CONTEXTS:
                single = dummy_decode(min(length, self.config.context_len), self.config.block_size)
                self.execute(single, dummy_sampling(0) if self.group.rank == 0 else None)
        self._cache.clear(torch.zeros(1, dtype=torch.int64, device=self.group.device))
        self._meet()  # rank 0 compiles the kernels that draw, which may take longer than a step

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._on_phase(name)
        began = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - began
