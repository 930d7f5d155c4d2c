"""Self-attention; this rank's share of the heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionContext, AttentionSpec, MergedHeads
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.kv.cache_specs import FullAttentionSpec, SlidingWindowSpec
from engine.layers.base import Build, Layer
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary
from parallel.linear import QKVParallelLinear, RowParallelLinear


class CachedAttention(Layer):
    """What a layer that attends asks of the cache and of the attention backend; heads of this rank.

    window: how many last tokens a query sees, itself included; 0 = all. scale: of scores; None = 1 / sqrt(head_dim).
    softcap: c in c * tanh(score / c); 0 = none. all_kv_heads: of all ranks.
    sinks: whether each head has a score of no key.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        all_kv_heads: int,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.all_kv_heads = all_kv_heads
        self.window = window
        self.scale = float(head_dim**-0.5) if scale is None else scale
        self.softcap = softcap
        self.has_sinks = sinks

    @override
    def cache_spec(self, dtype: torch.dtype) -> FullAttentionSpec:
        if self.window:
            return SlidingWindowSpec(dtype, self.num_kv_heads, self.head_dim, self.window)
        return FullAttentionSpec(dtype, self.num_kv_heads, self.head_dim)

    @override
    def attention_spec(self, config: EngineConfig, device: torch.device) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            windows=(self.window,),
            softcap=self.softcap,
            block_size=config.block_size,
            dtype=getattr(torch, config.dtype),
            device=device,
            fp8_cache=config.fp8_cache,
            batch_invariant=config.batch_invariant,
            sinks=self.has_sinks,
        )


class Attention(CachedAttention):
    """Attention of grouped heads, over all tokens or the last ones.

    heads, kv_heads: of all ranks. window: how many last tokens a query sees, itself included; 0 = all, as where no
    sequence can outgrow the one asked for. head_norm_eps: of RMSNorms of each head's query and key before the
    rotation, None = there are none. scale, softcap: as of `CachedAttention`. rotary: None = not rotated.

    Raises `CheckpointError` where query heads cannot share KV heads, `ShardingError` where they cannot be split.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        build: Build,
        *,
        rotary: Rotary | None = None,
        window: int = 0,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_norm_eps: float | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
            )
        group, dtype = build.group, build.dtype
        qkv = QKVParallelLinear(hidden, heads, kv_heads, head_dim, qkv_bias, group=group, dtype=dtype)
        super().__init__(
            qkv.num_heads,
            qkv.num_kv_heads,
            head_dim,
            all_kv_heads=kv_heads,
            window=0 if window >= build.max_positions else window,
            scale=scale,
            softcap=softcap,
        )
        self.rotary = rotary
        self.qkv = qkv
        self.output = RowParallelLinear(heads * head_dim, hidden, output_bias, group=group, dtype=dtype)
        self.eps = head_norm_eps or 0.0
        self.head_norms: Tensor | None = None  # [heads + kv heads, head_dim]
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if head_norm_eps is not None:
            self.q_norm, self.k_norm = (RMSNorm(head_dim, head_norm_eps, build) for _ in "qk")

    @override
    def finish_loading(self) -> None:
        """Lay the norms of queries and keys out as one weight per head."""
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight.expand(self.num_heads, -1), self.k_norm.weight.expand(self.num_kv_heads, -1))
            self.head_norms = torch.cat(norms)

    def forward(self, x: Tensor, rotations: Mapping[Rotary, Any], context: AttentionContext) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]. rotations: of the step, by what rotates."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        rotation = None if self.rotary is None else rotations[self.rotary]
        merged = MergedHeads(heads, self.head_norms, rotation, self.eps, self.kernels.norm_rotate)
        attended = context.attend(self.cache_index, merged, self.window)
        return self.output(attended.view(len(x), -1))


def attention_specs(
    layers: Sequence[Layer], config: EngineConfig, device: torch.device
) -> tuple[tuple[AttentionSpec, ...], tuple[int, ...]]:
    """Return what attention is asked for, once for layers that ask for the same but for the window.

    Also for each of `layers`, those of a model that have a cache, the number of its spec; -1 for one that asks for
    none. config: resolved.
    """
    windows: dict[AttentionSpec, set[int]] = {}  # by what is asked for without them
    asked: list[AttentionSpec | None] = []
    for layer in layers:
        spec = layer.attention_spec(config, device)
        asked.append(None if spec is None else replace(spec, windows=()))
        if spec is not None:
            windows.setdefault(replace(spec, windows=()), set()).update(spec.windows)
    numbers = {spec: number for number, spec in enumerate(windows)}
    specs = tuple(replace(spec, windows=tuple(sorted(found))) for spec, found in windows.items())
    return specs, tuple(-1 if spec is None else numbers[spec] for spec in asked)
