"""The one decoder: every served architecture is this class built from another spec.

Activations are flat, [num_tokens, ...]: the tokens of all sequences one after another, no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionContext, MergedHeads
from engine.kernels.base import Kernels, TorchKernels
from engine.models.layers import ACTIVATIONS, Norm
from engine.models.rope import RotaryTable
from engine.models.spec import DecoderSpec
from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.group import Group
from parallel.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from parallel.parameter import ShardedParameter, replicated


class Attention(nn.Module):
    """Self-attention of one layer; this rank's share of the heads."""

    def __init__(self, spec: DecoderSpec, layer: int, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = spec.hidden_size, spec.head_dim
        self.layer = layer
        self.window = spec.sliding_windows[layer]
        self.head_dim = width
        self.eps = spec.norm_eps
        self.qkv = QKVParallelLinear(
            hidden, spec.num_heads, spec.num_kv_heads, width, spec.qkv_bias, group=group, dtype=dtype
        )
        self.output = RowParallelLinear(spec.num_heads * width, hidden, spec.o_bias, group=group, dtype=dtype)
        self.num_heads, self.num_kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads
        self.q_norm: ShardedParameter | None = None
        self.k_norm: ShardedParameter | None = None
        self.head_norms: Tensor | None = None  # [heads + kv heads, head_dim]
        self.kernels: Kernels = TorchKernels()
        if spec.qk_norm:
            self.q_norm, self.k_norm = (replicated((width,), dtype, group.device) for _ in range(2))

    def finish_loading(self) -> None:
        """Lay the norms of queries and keys out as one weight per head."""
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.expand(self.num_heads, -1), self.k_norm.expand(self.num_kv_heads, -1))
            self.head_norms = torch.cat(norms)

    def forward(self, x: Tensor, rotation: Any, context: AttentionContext) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        merged = MergedHeads(heads, self.head_norms, rotation, self.eps, self.kernels.norm_rotate)
        attended = context.attend(self.layer, merged, self.window)
        return self.output(attended.view(len(x), -1))


class MLP(nn.Module):
    """Feed-forward of one layer, gated (up = gate and up in one product) or plain; this rank's share of its width."""

    def __init__(self, spec: DecoderSpec, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gated = spec.gated_mlp
        self.activation = ACTIVATIONS[spec.activation]
        self.kernels: Kernels = TorchKernels()
        self.up = (
            MergedColumnParallelLinear(hidden, [inner, inner], spec.mlp_bias, group=group, dtype=dtype)
            if spec.gated_mlp
            else ColumnParallelLinear(hidden, inner, spec.mlp_bias, group=group, dtype=dtype)
        )
        self.down = RowParallelLinear(inner, hidden, spec.mlp_bias, group=group, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        x = self.up(x)
        if not self.gated:
            return self.down(self.activation(x))
        if self.activation is F.silu:
            return self.down(self.kernels.silu_gate(x))
        gate, up = x.chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))


class DecoderLayer(nn.Module):
    """Pre-norm block: attention and feed-forward, each added to the residual stream."""

    def __init__(self, spec: DecoderSpec, layer: int, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = Norm(spec.norm, spec.hidden_size, spec.norm_eps, dtype, group.device)
        self.attention = Attention(spec, layer, group, dtype)
        self.mlp_norm = Norm(spec.norm, spec.hidden_size, spec.norm_eps, dtype, group.device)
        self.mlp = MLP(spec, group, dtype)

    def forward(self, residual: Tensor, update: Tensor | None, rotation: Any, context: AttentionContext) -> Tensor:
        """Return what is to be added to the residual stream; all are [num_tokens, hidden].

        update: what the layer before returned; it is added to `residual` here, in place, in one go with the norm.
        """
        update = self.attention(self.attention_norm.add(residual, update), rotation, context)
        return self.mlp(self.mlp_norm.add(residual, update))


class Decoder(nn.Module):
    """A decoder-only transformer with its output head.

    max_positions: longest sequence that will be run; sizes the rotary tables.
    prepare: called with the name and module of each layer as it is made, before the next takes memory.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        max_positions: int,
        group: Group,
        dtype: torch.dtype,
        prepare: Callable[[str, nn.Module], None] = lambda name, layer: None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.group = group
        # Whoever draws from logits widens them as it reads them; where they are capped they are wide already.
        self.logits_dtype = torch.float32 if spec.logits_softcap else dtype
        hidden, vocab = spec.hidden_size, spec.vocab_size
        self.embedding = VocabParallelEmbedding(vocab, hidden, group=group, dtype=dtype)
        self.positions: LearnedPositions | None = None
        self.rotary: RotaryTable | None = None
        if spec.rope is None:
            self.positions = LearnedPositions(spec, dtype, group.device)
        else:
            self.rotary = RotaryTable(spec.rope, spec.head_dim, max_positions, group.device)
        self.layers = nn.ModuleList()
        for i in range(spec.num_layers):
            self.layers.append(DecoderLayer(spec, i, group, dtype))
            prepare(f"layers.{i}", self.layers[i])
        self.norm = Norm(spec.norm, hidden, spec.norm_eps, dtype, group.device)
        self.kernels: Kernels = TorchKernels()
        self.head = ParallelLMHead(hidden, vocab, False, group=group, dtype=dtype)
        if spec.tied_embeddings:
            self.head.tie_to(self.embedding)

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Query heads and KV heads of this rank."""
        first = next(module for module in self.modules() if isinstance(module, Attention))
        return first.num_heads, first.num_kv_heads

    def finish_loading(self) -> None:
        """Prepare what depends on the weights; called once, after all of them are loaded."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.finish_loading()

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute norms, rotations and gates with these from now on; products are chosen by `choose_methods`."""
        for module in self.modules():
            if isinstance(module, Norm | Attention | MLP | Decoder):
                module.kernels = kernels

    def forward(self, input_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return the hidden states before the final norm: ids, positions [num_tokens] -> [num_tokens, hidden]."""
        residual = self.embedding(input_ids)
        if self.positions is not None:
            residual += self.positions(positions)
        rotation = None if self.rotary is None else self._rotation(self.rotary.rows(positions), context)
        update = None
        for layer in self.layers:
            update = layer(residual, update, rotation, context)
        return residual if update is None else residual.add_(update)

    def _rotation(self, angles: Tensor, context: AttentionContext) -> Any:
        return angles if context.backend.rotates else self.kernels.rotation(angles)

    def final(self, hidden: Tensor) -> Tensor:
        """Return the final hidden states in fp32, which embeddings are made of: [num, hidden] -> [num, hidden]."""
        return self.norm(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits on every rank, of `logits_dtype`: [num_samples, hidden] -> [num_samples, vocab].

        They are in a buffer of their own.
        """
        return self._capped(self.head(self.norm(hidden)))

    def own_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits of this rank's share of the vocabulary, -inf for padding: [num_samples, share].

        They are of `logits_dtype`. out: where to put them; None = a buffer of their own.
        """
        logits = self._capped(self.head.own(self.norm(hidden)))
        logits[:, self.head.num_own :] = float("-inf")
        return logits if out is None else out.copy_(logits)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.spec.logits_softcap
        return logits if not cap else logits.float().div_(cap).tanh_().mul_(cap)


class LearnedPositions(nn.Module):
    """A table of absolute position embeddings, whole on every rank."""

    weight: ShardedParameter

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = replicated((spec.max_positions, spec.hidden_size), dtype, device)

    def forward(self, positions: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden]."""
        return F.embedding(positions, self.weight)
