"""A model without its weights: on torch's device `meta`, where tensors have shapes and no contents."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from engine.layers.base import Build
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
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        return x

    @override
    def barrier(self) -> None:
        """There are no other ranks to wait for."""

    @override
    def close(self) -> None:
        """There is nothing to free."""


def blueprint(
    config: ModelConfig, size: int = 1, max_positions: int | None = None, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """Return rank 0's part of a model in a group of `size`. max_positions: as in `Build`, None = the model's own.

    Raises `CheckpointError` for what its family does not implement, and `ShardingError` when it cannot be split so.
    """
    build = Build(BlueprintGroup(size), dtype, max_positions or config.max_positions)
    with META:
        model: CausalLM = family_of(config.architecture, config.implementation)(config, build)
    return model.requires_grad_(False).eval()
