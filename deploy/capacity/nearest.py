"""What comes nearest to a deployment that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.config import flag
from deploy.capacity.fit import Fit, fit
from deploy.capacity.gpus import GPUS, Gpu
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.room import LEAST_CONTEXT
from engine.models.spec import DecoderSpec
from engine.resolve import resolve_for
from engine.worker.footprint import Footprint, footprint_of
from parallel.errors import ShardingError

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # ranks that are tried
LEAST_TOKENS = 256  # of a step, below which prompts would crawl


@dataclass(frozen=True, slots=True)
class Asked:
    """A deployment as it was asked for.

    accept: raises `ConfigError` where a fit does not do. measured: footprints that were measured already.
    """

    config: EngineConfig
    spec: DecoderSpec
    gpu: Gpu
    accept: Callable[[Fit], object] = lambda _: None
    measured: dict[EngineConfig, Footprint] = field(default_factory=dict)

    def works(self, gpu: Gpu | None = None, **settings: Any) -> bool:
        """Whether it would fit, and do, with another GPU or other settings."""
        try:
            self.accept(fit(replace(self.config, **settings), self.spec, gpu or self.gpu, self._footprint))
        except (ConfigError, ShardingError):
            return False
        return True

    def _footprint(self, config: EngineConfig, spec: DecoderSpec) -> Footprint:
        if config not in self.measured:
            self.measured[config] = footprint_of(config, spec)
        return self.measured[config]


def nearest(asked: Asked) -> list[str]:
    """Return the single changes that would do, as flags, nearest first; none where no single one does."""
    return [*_sizes(asked), *_contexts(asked), *_steps(asked), *_dtypes(asked), *_gpus(asked)]


def _sizes(asked: Asked) -> Iterator[str]:
    """Another number of ranks: more where memory is short, or the nearest that the model can be split over."""
    now = asked.config.tensor_parallel_size
    for size in sorted((size for size in SIZES if size != now), key=lambda size: (size < now, abs(size - now))):
        if asked.works(tensor_parallel_size=size):
            yield f"--tensor-parallel-size {size}"
            return


def _contexts(asked: Asked) -> Iterator[str]:
    """The longest context that fits, in steps of a block."""
    most = asked.config.max_model_len
    block = asked.config.block_size
    if most is None:
        return
    low, high = 0, min(most, asked.spec.max_positions) // block
    if high and asked.works(max_model_len=high * block):
        low = high
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if asked.works(max_model_len=middle * block) else (low, middle)
    if low * block >= min(LEAST_CONTEXT, most):
        yield f"{flag('max_model_len')} {low * block}"


def _steps(asked: Asked) -> Iterator[str]:
    """A smaller step, whose activations leave more."""
    tokens = asked.config.max_num_batched_tokens // 2
    while tokens >= LEAST_TOKENS:
        if asked.works(max_num_batched_tokens=tokens):
            yield f"{flag('max_num_batched_tokens')} {tokens}"
            return
        tokens //= 2


def _dtypes(asked: Asked) -> Iterator[str]:
    plain = replace(asked.config, max_model_len=None, num_kv_blocks=None)
    if resolve_for(plain, asked.spec, "cuda").dtype == "float32" and asked.works(dtype="bfloat16"):
        yield f"{flag('dtype')} bfloat16"


def _gpus(asked: Asked) -> Iterator[str]:
    """The least GPU of those that do and are not this one."""
    others = [gpu for gpu in GPUS.values() if gpu.name != asked.gpu.name]
    for gpu in sorted(others, key=lambda gpu: (gpu.memory, gpu.bandwidth)):
        if asked.works(gpu):
            yield f"--gpu {gpu.name}"
            return
