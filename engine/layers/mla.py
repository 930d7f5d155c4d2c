"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): one vector a token is all that is kept.

Keys and values of all heads are products with one latent vector, k = W_UK c and v = W_UV c. So they need not be
made: q . (W_UK c) = (W_UK^T q) . c, and the sum of weighted values is W_UV times that of the vectors. Queries, each
times its head's W_UK^T, attend to the vectors themselves, as to one key that all heads share and whose first features
are its value. Beside them lie the features of the key that are rotated, which all heads share, too.

Decoding reads the least of the cache so. Of long prompts it takes more products than keys and values made of the
vectors would, about 3.4 times as many in DeepSeek-V3's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from engine.attention.base import AttentionContext, AttentionSpec, MergedHeads
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.cache_specs import LatentSpec
from engine.layers.attention import CachedAttention
from engine.layers.base import Build, Layer
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary
from parallel.group import Group
from parallel.linear import ColumnParallelLinear, ParallelLinear, ReplicatedLinear, RowParallelLinear
from parallel.parameter import ShardedParameter
from parallel.sharding import divide, even_pieces

NORM_EPS = 1e-6  # of the norms of latent vectors, whatever the other norms have


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Features, as config.json calls them: kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank.

    queries: of the latent vector that queries are made of; None = they are made of the hidden state.
    """

    latent: int
    plain: int
    rotated: int
    value: int
    queries: int | None

    @property
    def query(self) -> int:
        """Features of one head's query."""
        return self.plain + self.rotated


class HeadProducts(Layer):
    """W_UK and W_UV of this rank's heads: products of each head with weights of its own.

    weight: [heads * (plain + value), latent], each head's W_UK and then its W_UV (`kv_b_proj`). On a CPU it gives way
    to two linear layers for each head, [latent, plain] and [value, latent], which multiply as all others do: a token
    has the same bits in any company.
    """

    weight: ShardedParameter

    def __init__(self, heads: int, sizes: LatentSizes, build: Build) -> None:
        super().__init__()
        self.sizes, self.group = sizes, build.group
        rows = heads * (sizes.plain + sizes.value)
        pieces = even_pieces([rows], build.group.rank, build.group.size, "kv_b_proj")
        shape = (pieces[0].size, sizes.latent)
        self.weight = ShardedParameter.of(shape, build.dtype, build.group.device, 0, pieces)
        self.keys, self.values = nn.ModuleList(), nn.ModuleList()

    def _by_head(self) -> Tensor:
        return self.weight.view(-1, self.sizes.plain + self.sizes.value, self.sizes.latent)

    @override
    def finish_loading(self) -> None:
        """Split the weight by heads where each is multiplied by itself."""
        if self.group.device.type != "cpu":
            return
        for head in self._by_head():
            up, value = head.split((self.sizes.plain, self.sizes.value))
            self.keys.append(_own_linear(up.t(), self.group))
            self.values.append(_own_linear(value, self.group))
        self.weight.data = self.weight.data.new_empty(0)

    def absorb(self, queries: Tensor, out: Tensor) -> None:
        """Write each head's queries times its W_UK^T to `out`: [num_tokens, heads, plain] -> [..., latent]."""
        if not len(self.keys):
            up = self._by_head()[:, : self.sizes.plain]
            out.copy_(torch.bmm(queries.transpose(0, 1), up).transpose(0, 1))
        for head, linear in enumerate(self.keys):
            out[:, head] = linear(queries[:, head])

    def expand(self, mixed: Tensor) -> Tensor:
        """Return each head's mean of latent vectors times its W_UV: [num_tokens, heads, latent] -> [..., value]."""
        if not len(self.values):
            up = self._by_head()[:, self.sizes.plain :]
            return torch.bmm(mixed.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)
        return torch.stack([linear(mixed[:, head]) for head, linear in enumerate(self.values)], dim=1)


def _own_linear(weight: Tensor, group: Group) -> ParallelLinear:
    return ParallelLinear(ShardedParameter(weight.clone(memory_format=torch.contiguous_format)), None, group)


class LowRankQueries(Layer):
    """up(norm(down(x))): queries of this rank's heads by way of a latent vector of `rank` features."""

    def __init__(self, hidden: int, rank: int, features: int, bias: bool, build: Build) -> None:
        super().__init__()
        self.down = ReplicatedLinear(hidden, rank, bias, build.group, build.dtype)
        self.norm = RMSNorm(rank, NORM_EPS, build)
        self.up = ColumnParallelLinear(rank, features, False, build.group, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, features of this rank]."""
        return self.up(self.norm(self.down(x)))


class LatentAttention(CachedAttention):
    """Attention to latent vectors, this rank's share of the heads; the vectors are whole on every rank.

    hidden: features of a token. heads: of all ranks. scale: of scores. bias: of `q_a_proj`, `kv_a_proj_with_mqa` and
    `o_proj`. interleaved: whether the features that are rotated together lie side by side in the checkpoint, not half
    a head apart.

    Raises `ShardingError` for heads that cannot be split over the ranks.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        sizes: LatentSizes,
        build: Build,
        *,
        rotary: Rotary,
        scale: float,
        bias: bool = False,
        interleaved: bool = True,
    ) -> None:
        group, dtype = build.group, build.dtype
        own = divide(heads, group.size, "num_attention_heads")
        super().__init__(own, 1, sizes.latent + sizes.rotated, all_kv_heads=1, scale=scale)
        self.sizes, self.rotary, self.interleaved = sizes, rotary, interleaved
        if sizes.queries is None:
            self.queries: nn.Module = ColumnParallelLinear(hidden, heads * sizes.query, False, group, dtype)
        else:
            self.queries = LowRankQueries(hidden, sizes.queries, heads * sizes.query, bias, build)
        self.kv_down = ReplicatedLinear(hidden, sizes.latent + sizes.rotated, bias, group, dtype)
        self.kv_norm = RMSNorm(sizes.latent, NORM_EPS, build)
        self.kv_up = HeadProducts(heads, sizes, build)
        self.output = RowParallelLinear(heads * sizes.value, hidden, bias, group, dtype)

    @property
    @override
    def pair_operations(self) -> int:
        return 2 * self.num_heads * (self.head_dim + self.sizes.latent)

    @override
    def cache_spec(self, dtype: torch.dtype) -> LatentSpec:
        return LatentSpec(dtype, self.head_dim, self.sizes.latent)

    @override
    def attention_spec(self, config: EngineConfig, device: torch.device) -> AttentionSpec:
        if config.fp8_cache:
            raise ConfigError(
                "kv_cache_dtype=fp8: latent vectors (MLA) are kept in the model's dtype; use kv_cache_dtype=auto",
                "kv_cache_dtype",
            )
        if config.batch_invariant and device.type == "cuda":
            raise ConfigError(
                "batch_invariant: on a GPU the products of latent attention's heads (MLA) depend on the batch; "
                "leave it out, or use device=cpu",
                "batch_invariant",
            )
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.head_dim,
            scale=self.scale,
            windows=(0,),
            softcap=0.0,
            block_size=config.block_size,
            dtype=getattr(torch, config.dtype),
            device=device,
            batch_invariant=config.batch_invariant,
            latent=self.sizes.latent,
        )

    def forward(self, x: Tensor, rotations: Mapping[Rotary, Any], context: AttentionContext) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]. rotations: of the step, by what rotates."""
        sizes, heads = self.sizes, self.num_heads
        query = self.queries(x).view(len(x), heads, sizes.query)
        key = self.kv_down(x)
        # Queries and behind them the key: [num_tokens, heads + 1, latent | rotated].
        merged = x.new_empty(len(x), heads + 1, self.head_dim)
        self.kv_up.absorb(query[..., : sizes.plain], merged[:, :heads, : sizes.latent])
        merged[:, heads, : sizes.latent] = self.kv_norm(key[:, : sizes.latent].contiguous())
        turned = x.new_empty(len(x), heads + 1, sizes.rotated)
        turned[:, :heads] = self._halves(query[..., sizes.plain :])
        turned[:, heads] = self._halves(key[:, sizes.latent :])
        merged[..., sizes.latent :] = self._rotated(turned, rotations[self.rotary], context)
        attended = context.attend(self.cache_index, MergedHeads(merged, None, None, 0.0, self.kernels.norm_rotate), 0)
        return self.output(self.kv_up.expand(attended).reshape(len(x), -1))

    def _halves(self, x: Tensor) -> Tensor:
        """Return x, [..., rotated], with the features that are rotated together half its width apart."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.interleaved else x

    def _rotated(self, heads: Tensor, rotation: Any, context: AttentionContext) -> Tensor:
        # A backend that rotates by itself has been given plain cosines and sines.
        found = self.kernels.rotation(rotation) if context.backend.rotates else rotation
        return self.kernels.norm_rotate(heads, None, found, 0.0)
