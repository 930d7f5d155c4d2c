"""Steps over scattered blocks with NaN wherever nothing was written, and attention to them by its definition."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.base import AttentionSpec, LayerCache, MergedHeads
from engine.inputs.step_buffers import to_device
from engine.kernels.base import TorchKernels
from engine.report import StepInputs


def spec(**values):
    known = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "scale": 0.3,
        "windows": (0,),
        "softcap": 0.0,
        "block_size": 16,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return AttentionSpec(**{**known, **values})


class Lab:
    """One layer's cache and one step: `shapes` are (cached, new) tokens of each sequence.

    padding: rows that a decode step is filled up with. tables and slots as the runner gives them.
    """

    def __init__(self, spec, shapes, padding=0, seed=0):
        self.spec, self.shapes = spec, shapes
        size = spec.block_size
        used = [-(-(cached + new) // size) for cached, new in shapes]
        numbers = np.random.default_rng(seed).permutation(sum(used)) + 1
        rows = len(shapes) + padding
        tables = np.zeros((rows, max(used, default=1)), np.int32)
        for row, blocks in enumerate(np.split(numbers, np.cumsum(used)[:-1])):
            tables[row, : len(blocks)] = blocks
        self.tables = tables
        ends = np.array([cached + new for cached, new in shapes] + [0] * padding, np.int32)
        news = np.array([new for _, new in shapes] + [1] * padding, np.int32)
        spans = [np.arange(cached, cached + new) for cached, new in shapes]
        slots = [self.slots(row, span) for row, span in enumerate(spans)] + [np.zeros(padding, np.int64)]
        self.positions = np.concatenate([*spans, np.zeros(padding)]).astype(np.int32)
        self.inputs = StepInputs(
            input_ids=np.zeros_like(self.positions),
            positions=self.positions,
            slot_mapping=np.concatenate(slots).astype(np.int32),
            query_start_loc=np.cumsum([0, *news]).astype(np.int32),
            seq_lens=ends,
            num_computed_tokens=np.maximum(ends - news, 0),
            block_tables=tables,
            logits_indices=np.empty(0, np.int32),
            copy_blocks=np.empty((0, 2), np.int32),
        )
        self.step, _ = to_device(self.inputs, spec.device)
        self._random = torch.Generator().manual_seed(seed)
        self.cache = self._cache(len(numbers) + 1)
        self.merged = self.random(len(self.positions), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)

    def slots(self, row, positions):
        size = self.spec.block_size
        return self.tables[row, positions // size] * size + positions % size

    def random(self, *shape):
        return torch.randn(shape, generator=self._random).to(self.spec.device, self.spec.dtype)

    def _cache(self, blocks):
        s = self.spec
        shape = (blocks, s.block_size, s.num_kv_heads, s.head_dim)
        pair = torch.full((2, *shape), torch.nan, device=s.device)
        scales = torch.rand(2, s.num_kv_heads, generator=self._random).to(s.device) + 0.5 if s.fp8_cache else None
        for row, (cached, _) in enumerate(self.shapes):
            where = torch.from_numpy(self.slots(row, np.arange(cached)))
            pair.flatten(1, 2)[:, where] = self.random(2, cached, *shape[2:]).float()
        return LayerCache(*pair.to(s.cache_dtype), scales)

    def sinks(self):
        """Return a score of each head that has no value, None where the spec asks for none."""
        return torch.linspace(-2.0, 4.0, self.spec.num_heads, device=self.spec.device) if self.spec.sinks else None

    def split(self):
        s = self.spec
        return self.merged.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)

    def heads(self, normed, rotated, kernels=None):
        """Return the product with random norms and angles."""
        s = self.spec
        norms = self.random(s.num_heads + s.num_kv_heads, s.head_dim) if normed else None
        angles = torch.rand(len(self.positions), s.head_dim // 2, generator=self._random) * 6
        rotation = torch.stack((angles.cos(), angles.sin()), 1).to(s.device) if rotated else None
        return MergedHeads(self.merged, norms, rotation, 1e-5, (kernels or TorchKernels()).norm_rotate, self.sinks())

    def stored(self):
        """Return the keys and values that the cache holds, in fp32 as they are attended to."""
        pair = torch.stack((self.cache.keys.float(), self.cache.values.float()))
        return pair if self.cache.scales is None else pair * self.cache.scales[:, None, None, :, None]

    def as_stored(self, key, value):
        """Return what `stored` is to give of these."""
        pair = torch.stack((key, value)).float()
        if self.cache.scales is None:
            return pair
        scales = self.cache.scales[:, None, :, None]
        return (pair / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales

    def defined(self, query, window):
        """Attention of `query` to what is stored now, from the definition, in fp64."""
        s = self.spec
        out = torch.zeros(query.shape, dtype=torch.float64, device=s.device)
        stored = self.stored().flatten(1, 2).double()
        first = 0
        for row, (cached, new) in enumerate(self.shapes):
            keys, values = stored[:, torch.from_numpy(self.slots(row, np.arange(cached + new))).to(s.device)]
            keys, values = (each.repeat_interleave(s.group, dim=1) for each in (keys, values))
            position = torch.arange(cached, cached + new, device=s.device)[:, None]
            key = torch.arange(cached + new, device=s.device)[None]
            seen = (key <= position) & (key > position - window) if window else key <= position
            scores = torch.einsum("qhd,khd->hqk", query[first : first + new].double(), keys) * s.scale
            if s.softcap:
                scores = torch.tanh(scores / s.softcap) * s.softcap
            scores = scores.masked_fill(~seen, float("-inf"))
            if s.sinks:
                sinks = self.sinks().double()[:, None, None].expand(-1, new, 1)
                scores = torch.cat((scores, sinks), dim=-1)
            weights = scores.softmax(-1)[..., : cached + new]
            out[first : first + new] = torch.einsum("hqk,khd->qhd", weights, values)
            first += new
        return out
