"""A model without its weights: on torch's device `meta`, where tensors have shapes and no contents."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, UnsupportedFieldError
from engine.layers.base import Build
from engine.layers.moe import Experts
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig
from engine.models.registry import family_of
from parallel.group import Group

META = torch.device("meta")
logger = logging.getLogger(__name__)


class BlueprintGroup(Group):
    """Rank 0 of a group whose other ranks are nowhere: tensors keep or get the shapes that they have in a group.

    exchanges, sent_bytes: sums and exchanges so far, and the bytes of what they were given. times: as how many each
    one counts from now on.
    """

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size
        self.device = META
        self.exchanges = self.sent_bytes = 0
        self.times = 1

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        self._note(x)
        return x

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x if self.size == 1 else torch.cat([x] * self.size, dim)

    @override
    def all_to_all(
        self, x: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        self._note(x)
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

    def _note(self, x: Tensor) -> None:
        if self.size > 1:
            self.exchanges += self.times
            self.sent_bytes += self.times * x.nbytes


def build_model(config: ModelConfig, build: Build) -> CausalLM:
    """Return a model without its weights, on the device of `build`.

    What a native family does not implement is left to transformers' layers where `config.falls_back`.

    Raises `CheckpointError` for what nobody implements, `ShardingError` when it cannot be split so, and
    `ConfigError` for expert parallelism without experts.
    """
    try:
        model: CausalLM = family_of(config.architecture, config.implementation)(config, build)
    except UnsupportedFieldError as refusal:
        if not config.falls_back or config.implementation == "transformers":
            raise
        model = _by_transformers(config, build, refusal)
    if build.expert_parallel and not any(isinstance(part, Experts) for part in model.modules()):
        raise ConfigError(
            f"enable_expert_parallel: {config.architecture} has no experts here; leave the flag out",
            "enable_expert_parallel",
        )
    return model


def _by_transformers(config: ModelConfig, build: Build, refusal: UnsupportedFieldError) -> CausalLM:
    """Return what transformers' layers make of a model that its native family refuses; raises both reasons."""
    try:
        model: CausalLM = family_of(config.architecture, "transformers")(
            replace(config, implementation="transformers"), build
        )
    except CheckpointError as error:
        raise CheckpointError(f"{refusal}; transformers' layers do not serve it either: {error}") from error
    if build.group.device != META:
        logger.info("model_impl=auto: transformers' layers, since the native family does not serve this: %s", refusal)
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
