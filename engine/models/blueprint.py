"""A model without its weights: on torch's device `meta`, where tensors have shapes and no contents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.base import Build
from engine.layers.moe import Experts
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig
from engine.models.registry import family_of
from parallel.group import Group

META = torch.device("meta")


class BlueprintGroup(Group):
    """Rank 0 of a group whose other ranks are nowhere: tensors keep or get the shapes that they have in a group."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size
        self.device = META

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x if self.size == 1 else torch.cat([x] * self.size, dim)

    @override
    def all_to_all(
        self, x: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        return x

    @override
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        return x

    @override
    def barrier(self) -> None:
        """There are no other ranks to wait for."""

    @override
    def close(self) -> None:
        """There is nothing to free."""


def build_model(config: ModelConfig, build: Build) -> CausalLM:
    """Return a model without its weights, on the device of `build`.

    Raises `CheckpointError` for what its family does not implement, `ShardingError` when it cannot be split so, and
    `ConfigError` for expert parallelism without experts.
    """
    model: CausalLM = family_of(config.architecture, config.implementation)(config, build)
    if build.expert_parallel and not any(isinstance(part, Experts) for part in model.modules()):
        raise ConfigError(
            f"enable_expert_parallel: {config.architecture} has no experts here; leave the flag out",
            "enable_expert_parallel",
        )
    return model


def blueprint(
    config: ModelConfig,
    size: int = 1,
    max_positions: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    expert_parallel: bool = False,
) -> CausalLM:
    """Return rank 0's part of a model in a group of `size`. max_positions: as in `Build`, None = the model's own.

    expert_parallel: as in `Build`. Raises as `build_model` does.
    """
    build = Build(BlueprintGroup(size), dtype, max_positions or config.max_positions, expert_parallel)
    with META:
        model = build_model(config, build)
    return model.requires_grad_(False).eval()


def outlined(config: EngineConfig, model: ModelConfig) -> CausalLM:
    """Return rank 0's part of a model as an engine would build it. config: resolved. Raises as `build_model` does."""
    return blueprint(
        model,
        config.tensor_parallel_size,
        config.context_len,
        getattr(torch, config.dtype),
        expert_parallel=config.enable_expert_parallel,
    )
