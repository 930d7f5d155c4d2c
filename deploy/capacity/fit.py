"""Whether a model fits GPUs, and what of their memory goes where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deploy.capacity.gpus import Gpu
from deploy.cli.sizes import gib
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.room import fit_cache, gpu_budget
from engine.models.spec import DecoderSpec
from engine.quantization.layers import quantization_of
from engine.resolve import resolve_for
from engine.worker.footprint import Footprint, footprint_of

# What is on a GPU beside torch's own tensors: the context of CUDA with its loaded kernels, and the buffers of NCCL
# where there are several ranks. Estimates: no GPU has told yet.
CONTEXT_BYTES = 512 << 20
NCCL_BYTES = 512 << 20

Measure = Callable[[EngineConfig, DecoderSpec], Footprint]


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on GPUs that hold it. All bytes are of one GPU.

    config: resolved, with the blocks that fit. lowered_unasked: whether its context, which nobody asked for, is less
    than the model's because no more fits.
    """

    gpu: Gpu
    config: EngineConfig
    spec: DecoderSpec
    footprint: Footprint
    num_blocks: int
    lowered_unasked: bool = False

    @property
    def other_bytes(self) -> int:
        """What CUDA and NCCL take."""
        return other_bytes(self.config)

    @property
    def kv_bytes(self) -> int:
        """The KV cache, null block included."""
        return self.num_blocks * self.footprint.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit the cache."""
        return (self.num_blocks - 1) * self.config.block_size

    @property
    def allowed_bytes(self) -> int:
        """What the engine may use."""
        return int(self.gpu.total_bytes * self.config.gpu_memory_utilization)


def fit(config: EngineConfig, spec: DecoderSpec, gpu: Gpu, measure: Measure = footprint_of) -> Fit:
    """Return how a model fits. config: as asked for, whatever its device.

    Raises `ConfigError` naming the setting where it does not fit or the GPU lacks the units for it, `ShardingError`
    where it cannot be split.
    """
    full = resolve_for(config, spec, "cuda")
    gpu.flops(product_dtype(full, spec))
    if full.fp8_cache and gpu.fp8 is None:
        raise ConfigError(
            f"kv_cache_dtype={full.kv_cache_dtype}: {gpu.name} has no fp8; use kv_cache_dtype=auto", "kv_cache_dtype"
        )
    found = measure(full, spec)
    left = cache_budget(full, found, gpu)
    blocks = left // found.block_bytes
    if blocks < 2:
        raise ConfigError(_too_large(full, found, gpu), "tensor_parallel_size")
    if full.num_kv_blocks is not None:
        if full.num_kv_blocks > blocks:
            raise ConfigError(
                f"num_kv_blocks={full.num_kv_blocks} takes {gib(full.num_kv_blocks * found.block_bytes)} of each "
                f"{gpu.name}, of which {gib(left)} are left; use at most {blocks}",
                "num_kv_blocks",
            )
        blocks = full.num_kv_blocks
    shrink = config.max_model_len is None
    fitted = fit_cache(full, blocks, found.block_bytes, shrink)
    return Fit(gpu, fitted, spec, found, blocks, shrink and fitted.context_len < spec.max_positions)


def product_dtype(config: EngineConfig, spec: DecoderSpec) -> str:
    """Return what the products in the layers are computed in: the model's dtype, or "fp8"."""
    quantization = quantization_of(config, spec)
    return "fp8" if quantization is not None and quantization.weights == "fp8" else config.dtype


def cache_budget(config: EngineConfig, found: Footprint, gpu: Gpu) -> int:
    """Return the bytes of one GPU that its KV cache gets, by the engine's own rule; negative where there are none."""
    total = gpu.total_bytes
    free = total - other_bytes(config) - found.weight_bytes
    peak = found.weight_bytes + found.step_bytes
    return gpu_budget(config, total, free, peak, found.weight_bytes) - found.graph_bytes


def other_bytes(config: EngineConfig) -> int:
    """Return the bytes of a GPU that torch does not account for."""
    return CONTEXT_BYTES + (NCCL_BYTES if config.tensor_parallel_size > 1 else 0)


def _too_large(config: EngineConfig, found: Footprint, gpu: Gpu) -> str:
    ranks = config.tensor_parallel_size
    split = f"tensor_parallel_size={ranks}: " if ranks > 1 else ""
    graphs = f"CUDA graphs {gib(found.graph_bytes)}, " if found.graph_bytes else ""
    return (
        f"{split}of each {gpu.name} the weights take {gib(found.weight_bytes)}, a step {gib(found.step_bytes)}, "
        f"{graphs}and CUDA {gib(other_bytes(config))}, which leaves no KV cache of the "
        f"{gib(gpu.total_bytes * config.gpu_memory_utilization)} that gpu_memory_utilization="
        f"{config.gpu_memory_utilization:g} allows"
    )
