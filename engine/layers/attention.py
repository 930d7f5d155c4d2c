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
from engine.kv.cache_specs import CacheSpec, FullAttentionSpec, SlidingWindowSpec
from engine.layers.base import Build, Layer
from engine.layers.mlp import sigmoid
from engine.layers.norm import EachHeadNorm, HeadsNorm, RMSNorm
from engine.layers.rope import QueryScale, Rotary
from parallel.linear import QKVParallelLinear, RowParallelLinear
from parallel.parameter import ShardedParameter
from parallel.sharding import even_pieces


class CachedAttention(Layer):
    """What a layer that attends asks of the cache and of the attention backend; heads of this rank.

    window: how many last tokens a query sees, itself included; 0 = all. scale: of scores; None = 1 / sqrt(head_dim).
    softcap: c in c * tanh(score / c); 0 = none. all_kv_heads: of all ranks.
    sinks: whether each head has a score of no key. chunk: as of `AttentionSpec`.
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
        chunk: int = 0,
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.all_kv_heads = all_kv_heads
        self.window = window
        self.scale = float(head_dim**-0.5) if scale is None else scale
        self.softcap = softcap
        self.has_sinks = sinks

    @property
    def pair_operations(self) -> int:
        """What one query and one key cost, of all heads: products and sums of the score and of the value."""
        return 4 * self.num_heads * self.head_dim

    @override
    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
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
            chunk=self.chunk,
        )


class Attention(CachedAttention):
    """Attention of grouped heads, over all tokens or the last ones.

    heads, kv_heads: of all ranks. window: how many last tokens a query sees, itself included; 0 = all, as where no
    sequence can outgrow the one asked for. head_norm_eps: of RMSNorms of queries and keys before the rotation, None =
    there are none. norm_heads: whether they are of each head, or else of all heads of a token together.
    norm_weights: whether they have weights. norm_each: whether they are LayerNorms instead, one for each head
    with weights of its own. norm_offset: as of `RMSNorm`. scale, softcap, chunk: as of
    `CachedAttention`. rotary: None = not rotated. sinks: whether each head has a learned score that takes its share
    of the softmax and adds nothing (gpt-oss). query_scale: None = queries are not scaled. gated: whether what each
    head gives is multiplied by a sigmoid of the token, which the checkpoint holds beside its query (Qwen3-Next).

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
        norm_heads: bool = True,
        norm_offset: float = 0.0,
        norm_weights: bool = True,
        norm_each: bool = False,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        chunk: int = 0,
        query_scale: QueryScale | None = None,
        gated: bool = False,
    ) -> None:
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
            )
        group, dtype = build.group, build.dtype
        per_head = 2 if gated else 1
        qkv = QKVParallelLinear(hidden, heads * per_head, kv_heads, head_dim, qkv_bias, group=group, dtype=dtype)
        super().__init__(
            qkv.num_heads // per_head,
            qkv.num_kv_heads,
            head_dim,
            all_kv_heads=kv_heads,
            window=0 if window >= build.max_positions else window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            chunk=0 if chunk >= build.max_positions else chunk,
        )
        self.query_scale, self.gated = query_scale, gated
        self.dtype = dtype
        self.rotary = rotary
        self.qkv = qkv
        self.output = RowParallelLinear(heads * head_dim, hidden, output_bias, group=group, dtype=dtype)
        self.eps = head_norm_eps or 0.0
        self.head_norms: Tensor | None = None  # [heads + kv heads, head_dim]
        self.q_norm: RMSNorm | HeadsNorm | EachHeadNorm | None = None
        self.k_norm: RMSNorm | HeadsNorm | EachHeadNorm | None = None
        order = None if rotary is None else rotary.feature_order
        if head_norm_eps is not None and norm_each:
            self.q_norm, self.k_norm = (
                EachHeadNorm(each, head_dim, head_norm_eps, build, order) for each in (heads, kv_heads)
            )
        elif head_norm_eps is not None and not norm_weights:
            self.head_norms = torch.ones(
                self.num_heads + self.num_kv_heads, head_dim, dtype=dtype, device=group.device
            )
        elif head_norm_eps is not None and norm_heads:
            self.q_norm, self.k_norm = (RMSNorm(head_dim, head_norm_eps, build, offset=norm_offset) for _ in "qk")
        elif head_norm_eps is not None:
            self.q_norm, self.k_norm = (HeadsNorm(each, head_dim, head_norm_eps, build) for each in (heads, kv_heads))
        self.sinks: ShardedParameter | None = None
        if sinks:
            pieces = even_pieces([heads], group.rank, group.size, "num_attention_heads")
            self.sinks = ShardedParameter.of((self.num_heads,), torch.float32, group.device, 0, pieces)
        if gated or order is not None:
            self._order_rows(range(head_dim) if order is None else order)

    def _order_rows(self, features: Sequence[int]) -> None:
        """Have the product give queries, keys, values and gates, the first two with features as they are rotated."""
        size, of_queries = self.head_dim, self.qkv.num_heads
        queries = range(0, of_queries, 2 if self.gated else 1)
        keys = range(of_queries, of_queries + self.num_kv_heads)
        values = range(keys.stop, keys.stop + self.num_kv_heads)
        gates = range(1, of_queries, 2) if self.gated else ()
        rows = [head * size + feature for head in (*queries, *keys) for feature in features]
        self.qkv.row_order = rows + [head * size + i for head in (*values, *gates) for i in range(size)]

    @override
    def finish_loading(self) -> None:
        """Put the norms of queries and keys in the order of their features, and lay those of heads side by side."""
        order = None if self.rotary is None else self.rotary.feature_order
        for norm in (self.q_norm, self.k_norm):
            if isinstance(norm, RMSNorm | HeadsNorm) and order is not None:
                norm.weight.data = norm.weight.view(-1, self.head_dim)[:, order].flatten()
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            counts = ((self.q_norm, self.num_heads), (self.k_norm, self.num_kv_heads))
            norms = [(norm.weight + norm.offset).expand(count, -1) for norm, count in counts]
            self.head_norms = torch.cat(norms).to(self.dtype)

    def forward(self, x: Tensor, rotations: Mapping[Layer, Any], context: AttentionContext) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]. rotations: of the step, by the layer that makes them."""
        merged = self.qkv(x)
        before = (HeadsNorm, EachHeadNorm)  # others are computed together with the rotation
        if isinstance(self.q_norm, before) and isinstance(self.k_norm, before):
            q, k = self.qkv.q_size, self.qkv.kv_size
            merged[:, :q] = self.q_norm(merged[:, :q])
            merged[:, q : q + k] = self.k_norm(merged[:, q : q + k])
        gate: Tensor | None = None
        if self.gated:
            merged, gate = merged.split((merged.shape[1] - self.output_size, self.output_size), dim=1)
        heads = merged.unflatten(1, (-1, self.head_dim))
        if self.query_scale is not None:
            heads[:, : self.num_heads] *= rotations[self.query_scale]
        rotation = None if self.rotary is None else rotations[self.rotary]
        asked = MergedHeads(heads, self.head_norms, rotation, self.eps, self.kernels.norm_rotate, self.sinks)
        attended = context.attend(self.cache_index, asked, self.window)
        found = attended.view(len(x), -1)
        return self.output(found if gate is None else found * sigmoid(gate))

    @property
    def output_size(self) -> int:
        """Features that this rank's heads give together."""
        return self.num_heads * self.head_dim


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
