"""Whether a model fits GPUs, what of their memory goes where, and what comes nearest where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from deploy.capacity.gpus import GPUS, Gpu
from deploy.cli.terminal import gib
from engine.config import EngineConfig
from engine.errors import ConfigError, flag
from engine.kv.cache_size import LEAST_CONTEXT, fit_cache, fit_states, given_budget, gpu_budget, memory_share
from engine.models.config import ModelConfig
from engine.quantization.select import quantization_of
from engine.resolve import resolve_for
from engine.worker.footprint import Footprint, footprint_of
from parallel.errors import ShardingError

# What is on a GPU beside torch's own tensors: the context of CUDA with its loaded kernels, and the buffers of NCCL
# where there are several ranks. Estimates: none was measured on a GPU yet.
CONTEXT_BYTES = 512 << 20
NCCL_BYTES = 512 << 20

Measure = Callable[[EngineConfig, ModelConfig], Footprint]


class Measured:
    """Footprints of one model, each of which is measured once."""

    def __init__(self) -> None:
        self._found: dict[EngineConfig, Footprint] = {}

    def __call__(self, config: EngineConfig, model: ModelConfig) -> Footprint:
        """Return what `footprint_of` does."""
        # How much memory the cache gets changes nothing of it.
        key = replace(config, gpu_memory_utilization=1.0, kv_cache_memory_bytes=None, num_kv_blocks=None)
        if key not in self._found:
            known = next(iter(self._found.values()), None)
            self._found[key] = footprint_of(config, model, None if known is None else known.parameters)
        return self._found[key]


@dataclass(frozen=True, slots=True)
class GpuFit:
    """A model on GPUs that hold it. All bytes are of one GPU.

    config: resolved, with the blocks that fit. lowered_unasked: whether its context, which was not asked for, is less
    than the model's because no more fits.
    """

    gpu: Gpu
    config: EngineConfig
    model: ModelConfig
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
    def state_bytes(self) -> int:
        """The slots of recurrent states: of running sequences, of snapshots, and one for steps without sequences."""
        snapshots = self.config.num_state_snapshots
        return 0 if snapshots is None else (self.config.max_num_seqs + snapshots + 1) * self.footprint.state_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit the cache."""
        return (self.num_blocks - 1) * self.config.block_size

    @property
    def whole_sequences(self) -> int:
        """Sequences as long as the context that fit the cache at a time."""
        return self.kv_tokens // self.config.context_len

    @property
    def allowed_bytes(self) -> int:
        """What the engine may use."""
        return int(self.gpu.total_bytes * memory_share(self.config))


def fit(config: EngineConfig, model: ModelConfig, gpu: Gpu, measure: Measure = footprint_of) -> GpuFit:
    """Return how a model fits. config: as asked for, whatever its device.

    Raises `ConfigError` naming the setting where it does not fit or the GPU lacks the units for it, `ShardingError`
    where it cannot be split.
    """
    full = resolve_for(config, model, "cuda")
    gpu.flops(product_dtype(full, model))
    if full.fp8_cache and gpu.fp8 is None:
        raise ConfigError(
            f"kv_cache_dtype={full.kv_cache_dtype}: {gpu.name} has no fp8; use kv_cache_dtype=auto", "kv_cache_dtype"
        )
    found = measure(full, model)
    room = cache_budget(full, found, gpu)
    by_bytes = full.kv_cache_memory_bytes is not None and full.num_kv_blocks is None
    budget = given_budget(full, room) if by_bytes else room
    full, states = fit_states(full, found.state_bytes, max(budget, 0))
    left = budget - states
    blocks = left // found.block_bytes
    if blocks < 2 and not by_bytes:
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
    return GpuFit(gpu, fitted, model, found, blocks, shrink and fitted.context_len < model.max_positions)


def product_dtype(config: EngineConfig, model: ModelConfig) -> str:
    """Return what the products in the layers are computed in: the model's dtype, or "fp8"."""
    quantization = quantization_of(config, model.quantization)
    return "fp8" if quantization is not None and quantization.in_fp8 else config.dtype


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
    share = memory_share(config)
    allowed = "it has" if share == 1 else f"gpu_memory_utilization={share:g} allows"
    return (
        f"{split}of each {gpu.name} the weights take {gib(found.weight_bytes)}, a step {gib(found.step_bytes)}, "
        f"{graphs}and CUDA {gib(other_bytes(config))}, which leaves no KV cache of the "
        f"{gib(gpu.total_bytes * share)} that {allowed}"
    )


SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # ranks that are tried
LEAST_TOKENS = 256  # of a step, below which prompts would crawl


@dataclass(frozen=True, slots=True)
class Asked:
    """A deployment as it was asked for.

    accept: raises `ConfigError` where a fit does not do.
    """

    config: EngineConfig
    model: ModelConfig
    gpu: Gpu
    accept: Callable[[GpuFit], object] = lambda _: None
    measure: Measured = field(default_factory=Measured)

    def works(self, gpu: Gpu | None = None, **settings: Any) -> bool:
        """Whether it would fit, and do, with another GPU or other settings."""
        try:
            self.accept(fit(replace(self.config, **settings), self.model, gpu or self.gpu, self.measure))
        except (ConfigError, ShardingError):
            return False
        return True


def nearest(asked: Asked) -> list[str]:
    """Return the single changes that would do, as flags, nearest first; none where no single one does."""
    found = (_sizes, _weights, _caches, _budgets, _contexts, _steps, _dtypes, _gpus)
    return [change for changes in found for change in changes(asked)]


def roomier(asked: Asked) -> list[str]:
    """Return the single changes of how a model is held that would do, as flags; its context stays as long."""
    return [change for changes in (_sizes, _weights, _caches, _budgets) for change in changes(asked)]


def _sizes(asked: Asked) -> Iterator[str]:
    """Another number of ranks: more where memory is short, or the nearest that the model can be split over."""
    now = asked.config.tensor_parallel_size
    for size in sorted((size for size in SIZES if size != now), key=lambda size: (size < now, abs(size - now))):
        if asked.works(tensor_parallel_size=size):
            yield f"--tensor-parallel-size {size}"
            return


def _weights(asked: Asked) -> Iterator[str]:
    """Weights in eight bits, fp8 where the GPU multiplies it, and in four: of plain ones, made as they are loaded."""
    now = asked.config.quantization
    if asked.model.quantization is not None or now == "int4":
        return
    eight = next((each for each in ("fp8", "int8") if asked.works(quantization=each)), None) if now is None else None
    for method in (eight, "int4"):
        if method is not None and asked.works(quantization=method):
            yield f"--quantization {method}"


def _caches(asked: Asked) -> Iterator[str]:
    """Keys and values in fp8."""
    if not asked.config.fp8_cache and asked.works(kv_cache_dtype="fp8"):
        yield f"{flag('kv_cache_dtype')} fp8"


def _budgets(asked: Asked) -> Iterator[str]:
    """All the memory that is left, where less is asked for."""
    if asked.config.kv_cache_memory_bytes is not None and asked.works(kv_cache_memory_bytes=None):
        yield f"leaving {flag('kv_cache_memory_bytes')} out"


def _contexts(asked: Asked) -> Iterator[str]:
    """The longest context that fits, in steps of a block."""
    most = asked.config.max_model_len
    block = asked.config.block_size
    if most is None:
        return
    low, high = 0, min(most, asked.model.max_positions) // block
    if high and asked.works(max_model_len=high * block):
        low = high
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if asked.works(max_model_len=middle * block) else (low, middle)
    if low * block >= min(LEAST_CONTEXT, most):
        yield f"{flag('max_model_len')} {low * block}"


def _steps(asked: Asked) -> Iterator[str]:
    """A smaller step, whose activations leave more."""
    tokens = asked.config.token_budget // 2
    while tokens >= LEAST_TOKENS:
        if asked.works(max_num_batched_tokens=tokens):
            yield f"{flag('max_num_batched_tokens')} {tokens}"
            return
        tokens //= 2


def _dtypes(asked: Asked) -> Iterator[str]:
    plain = replace(asked.config, max_model_len=None, num_kv_blocks=None)
    if resolve_for(plain, asked.model, "cuda").dtype == "float32" and asked.works(dtype="bfloat16"):
        yield f"{flag('dtype')} bfloat16"


def _gpus(asked: Asked) -> Iterator[str]:
    """The least GPU of those that do and are not this one."""
    others = [gpu for gpu in GPUS.values() if gpu.name != asked.gpu.name]
    for gpu in sorted(others, key=lambda gpu: (gpu.memory, gpu.bandwidth)):
        if asked.works(gpu):
            yield f"--gpu {gpu.name}"
            return
