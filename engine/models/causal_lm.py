"""What the engine asks of a model.

Activations are flat, [num_tokens, ...]: the tokens of all sequences one after another, no padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.attention.base import AttentionContext
from engine.kernels.base import Kernels
from engine.kv.cache_specs import CacheSpec, RecurrentSpec
from engine.layers.attention import CachedAttention
from engine.layers.base import Layer, Names, Stored, WeightRule
from engine.layers.embedding import ParallelLMHead
from engine.models.config import ModelConfig
from parallel.group import Group


class CausalLM(nn.Module, ABC):
    """A decoder-only transformer with its output head, on one rank.

    logits_dtype: of `logits` and `own_logits`. cached: the layers that have a cache, in order. layers: all that lies
    between embedding and final norm, at `layers_path`. names: what modules are called in a checkpoint.
    """

    names: ClassVar[Names]
    layers_path: str = "layers"
    group: Group
    hidden_size: int
    vocab_size: int
    logits_dtype: torch.dtype
    layers: nn.Module
    head: ParallelLMHead
    cached: tuple[Layer, ...]

    @property
    def supports_graphs(self) -> bool:
        """Whether its steps can be recorded in CUDA graphs, as it computes now."""
        return False

    @property
    @abstractmethod
    def table(self) -> Tensor:
        """This rank's rows of the embedding table."""

    @property
    @abstractmethod
    def kernels(self) -> Kernels:
        """What is computed with outside of attention."""

    @abstractmethod
    def weights(self, on_disk: Collection[str] = ()) -> Iterator[WeightRule]:
        """Yield a rule for every tensor that a checkpoint must have.

        on_disk: names of the tensors that it has, where it may hold the same weights in more than one way.
        """

    @abstractmethod
    def use_kernels(self, select: Callable[[int], Kernels]) -> None:
        """Compute norms, rotations and gates with these from now on. select: the kernels for heads of a size."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return the hidden states that `final`, `logits` and `own_logits` take.

        ids, positions [num_tokens] -> [num_tokens, hidden].
        """

    @abstractmethod
    def final(self, hidden: Tensor) -> Tensor:
        """Return the final hidden states in fp32, which embeddings are made of: [num, hidden] -> [num, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits on every rank, of `logits_dtype`: [num_samples, hidden] -> [num_samples, vocab].

        They are in a buffer of their own.
        """

    @abstractmethod
    def own_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits of this rank's share of the vocabulary, -inf for padding: [num_samples, share].

        They are of `logits_dtype`. out: where to put them; None = a buffer of their own.
        """

    def stored(self, names: Iterable[str], wanted: Iterable[str]) -> Stored | None:
        """Return how a checkpoint with tensors of these names holds those of the rules; None = under their names."""
        return None

    @classmethod
    def is_unused(cls, config: ModelConfig, layer: int) -> bool:
        """Whether a layer that a checkpoint holds beyond the model's own is there for what is not run.

        Such as DeepSeek-V3's layer that predicts several tokens at once.
        """
        return False

    @property
    def attention(self) -> tuple[CachedAttention, ...]:
        """The layers that attend."""
        return tuple(part for part in self.cached if isinstance(part, CachedAttention))

    def attention_paths(self) -> Iterator[tuple[str, CachedAttention]]:
        """Yield the layers that attend, each with the name of the layer that it is part of, such as layers.3."""
        for path, part in self.named_modules():
            if isinstance(part, CachedAttention):
                yield path.rpartition(".")[0], part

    @property
    def heads(self) -> str:
        """This rank's heads in words, those of all layers that are unlike."""
        kinds = dict.fromkeys((part.num_heads, part.num_kv_heads) for part in self.attention)
        return " or ".join(f"{heads} heads on {kv_heads} KV heads" for heads, kv_heads in kinds)

    def cache_specs(self, dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        """Return what the layers that have a cache keep of each token. dtype: of keys and values."""
        return tuple(spec for layer in self.cached if (spec := layer.cache_spec(dtype)) is not None)

    @property
    def keeps_states(self) -> bool:
        """Whether any layer keeps a recurrent state."""
        return any(isinstance(spec, RecurrentSpec) for spec in self.cache_specs(torch.float32))

    def finish_loading(self) -> None:
        """Prepare what depends on the weights; called once, after all of them are loaded."""
        for part in self.parts():
            part.finish_loading()

    def parts(self) -> Iterator[Layer]:
        """Yield all layers inside the model."""
        return (part for part in self.modules() if isinstance(part, Layer))
