"""What families of our own are: a stack of layers between an embedding and an output head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from engine.attention.base import AttentionContext
from engine.errors import CheckpointError
from engine.kernels.base import Kernels
from engine.layers.attention import Attention
from engine.layers.base import Build, Layer, WeightRule, stacked_where_stored, weight_rules
from engine.layers.embedding import LearnedPositions, ParallelLMHead, VocabParallelEmbedding
from engine.layers.moe import Experts
from engine.layers.norm import Norm
from engine.layers.rope import QueryScale, Rotary
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig


class DecoderLayer(nn.Module):
    """Pre-norm block: attention and feed-forward, each added to the residual stream.

    attention: called as `Attention` is. mlp: dense or of experts, [num_tokens, hidden] -> [num_tokens, hidden].
    scale: what both are multiplied by before they are added.
    """

    def __init__(
        self, attention_norm: Norm, attention: Layer, mlp_norm: Norm, mlp: Layer, *, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.scale = scale

    def forward(
        self, residual: Tensor, update: Tensor | None, rotations: Mapping[Layer, Any], context: AttentionContext
    ) -> Tensor:
        """Return what is to be added to the residual stream; all are [num_tokens, hidden].

        update: what the layer before returned; it is added to `residual` here, in place, in one go with the norm.
        """
        update = self.attention(self.attention_norm.add(residual, update), rotations, context)
        added: Tensor = self.mlp(self.mlp_norm.add(residual, self._scaled(update)))
        return self._scaled(added)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale


class NormedTwiceLayer(DecoderLayer):
    """Attention and feed-forward are normed before and after (Gemma 2, arXiv 2408.00118)."""

    def __init__(
        self,
        attention_norm: Norm,
        attention: Layer,
        after_attention: Norm,
        mlp_norm: Norm,
        mlp: Layer,
        after_mlp: Norm,
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp)
        self.after_attention = after_attention
        self.after_mlp = after_mlp

    def forward(
        self, residual: Tensor, update: Tensor | None, rotations: Mapping[Layer, Any], context: AttentionContext
    ) -> Tensor:
        """As of `DecoderLayer`."""
        update = self.attention(self.attention_norm.add(residual, update), rotations, context)
        added: Tensor = self.mlp(self.mlp_norm.add(residual, self.after_attention(update)))
        return self.after_mlp(added)


class NormedAfterLayer(nn.Module):
    """Attention and feed-forward are normed after, not before (OLMo 2, arXiv 2501.00656)."""

    def __init__(self, attention: Layer, after_attention: Norm, mlp: Layer, after_mlp: Norm) -> None:
        super().__init__()
        self.attention = attention
        self.after_attention = after_attention
        self.mlp = mlp
        self.after_mlp = after_mlp

    def forward(
        self, residual: Tensor, update: Tensor | None, rotations: Mapping[Layer, Any], context: AttentionContext
    ) -> Tensor:
        """As of `DecoderLayer`."""
        if update is not None:
            residual += update
        residual += self.after_attention(self.attention(residual, rotations, context))
        return self.after_mlp(self.mlp(residual))


class ParallelLayer(nn.Module):
    """Attention and feed-forward read one norm, and both are added to the residual stream (GPT-J, GPT-NeoX)."""

    def __init__(self, norm: Norm, attention: Layer, mlp: Layer) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention
        self.mlp = mlp

    def forward(
        self, residual: Tensor, update: Tensor | None, rotations: Mapping[Layer, Any], context: AttentionContext
    ) -> Tensor:
        """As of `DecoderLayer`."""
        x = self.norm.add(residual, update)
        attended: Tensor = self.attention(x, rotations, context)
        return attended + self.mlp(x)


class Stack(NamedTuple):
    """What a family is composed of.

    layers: called as a `DecoderLayer` is. positions: learned ones that are added to the embeddings. tied: whether the
    output head is the embedding's table. softcap: c in c * tanh(logit / c); 0 = none. embedding_scale: of embeddings.
    logit_divisor: of logits, before they are capped.
    """

    layers: Sequence[nn.Module]
    norm: Norm
    tied: bool
    positions: LearnedPositions | None = None
    softcap: float = 0.0
    embedding_scale: float = 1.0
    logit_divisor: float = 1.0


class DecoderLM(CausalLM):
    """A family says what it is composed of, and what its weights are called in a checkpoint."""

    layers: nn.ModuleList

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        stack = self.stack(config, build)
        self.group = build.group
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.softcap, self.logit_divisor = stack.softcap, stack.logit_divisor
        self.embedding_scale = stack.embedding_scale
        # Samplers widen logits as they read them; where they are capped they are wide already.
        self.logits_dtype = torch.float32 if stack.softcap else build.dtype
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build.group, build.dtype)
        self.positions = stack.positions
        self.layers = nn.ModuleList(stack.layers)
        self.norm = stack.norm
        self.head = ParallelLMHead(config.hidden_size, config.vocab_size, False, build.group, build.dtype)
        if stack.tied:
            self.head.tie_to(self.embedding)
        self.of_positions = tuple(
            dict.fromkeys(part for part in self.modules() if isinstance(part, Rotary | QueryScale))
        )
        self.cached = tuple(part for part in self.parts() if part.cache_spec(build.dtype) is not None)
        if not self.attention:
            raise CheckpointError(
                "config.json: no layer attends to other tokens; one at least must, to be served here"
            )
        for index, layer in enumerate(self.cached):
            layer.cache_index = index

    @staticmethod
    @abstractmethod
    def stack(config: ModelConfig, build: Build) -> Stack:
        """Return what the family is composed of.

        Raises `CheckpointError` naming the field of the config that asks for what is not implemented.
        """

    @property
    @override
    def supports_graphs(self) -> bool:
        """Not of models with a recurrent state: where that lies in a step is not recorded yet."""
        waits = any(isinstance(part, Experts) and part.counts_on_host for part in self.modules())
        return not waits and not self.keeps_states

    @property
    @override
    def table(self) -> Tensor:
        return self.embedding.weight

    @property
    @override
    def kernels(self) -> Kernels:
        return self.norm.kernels

    @override
    def weights(self, on_disk: Collection[str] = ()) -> Iterator[WeightRule]:
        return stacked_where_stored(weight_rules(self, self.names), self, on_disk)

    @override
    def use_kernels(self, select: Callable[[int], Kernels]) -> None:
        sizes: dict[Layer, int] = {
            part: part.head_dim for part in self.parts() if isinstance(part, Attention | Rotary)
        }
        found = {size: select(size) for size in dict.fromkeys(sizes.values())}
        for part in self.parts():
            part.kernels = found[sizes.get(part, next(iter(found)))]
            if isinstance(part, Experts):
                part.use_kernels(part.kernels)

    @override
    def forward(self, input_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return the hidden states before the final norm: ids, positions [num_tokens] -> [num_tokens, hidden]."""
        residual = self.embedding(input_ids)
        if self.embedding_scale != 1.0:
            residual = residual * self.embedding_scale
        if self.positions is not None:
            residual += self.positions(positions)
        rotations = {part: part(positions, context) for part in self.of_positions}
        update = None
        for layer in self.layers:
            update = layer(residual, update, rotations, context)
        return residual if update is None else residual.add_(update)

    @override
    def final(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden).float()

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        return self._capped(self.head(self.norm(hidden)))

    @override
    def own_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self._capped(self.head.own(self.norm(hidden)))
        logits[:, self.head.num_own :] = float("-inf")
        return logits if out is None else out.copy_(logits)

    def _capped(self, logits: Tensor) -> Tensor:
        if self.logit_divisor != 1.0:
            logits /= self.logit_divisor
        return logits if not self.softcap else logits.float().div_(self.softcap).tanh_().mul_(self.softcap)
