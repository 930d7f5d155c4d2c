"""Attention in compiled C for this CPU: straight from the cache blocks, no gathering, no padding, no masks."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionSpec, Ints, LayerCache, PagedAttention, StepLayout, StepTensors, cut
from engine.kernels.attend import AttentionStep
from engine.kernels.native import LANES, heads_address, native_library, why_not_native

logger = logging.getLogger(__name__)

SIDE = 16  # rows that the matrix unit of a CPU takes at most
PART_HEADS = 12  # of those that share the one key of a latent cache: the others may be another thread's
WORTH = 1 << 20  # products, half of them of queries and keys, from which on other threads pay


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The step in C, and the memory that it points into."""

    step: AttentionStep
    tiles: Ints
    tensors: StepTensors
    scratch: Tensor
    parts: Tensor | None


def why_not_native_attention(spec: AttentionSpec) -> str | None:
    """Return why this backend cannot serve a model here, None when it can, a compiler permitting."""
    if spec.block_size % LANES:
        return f"block_size {spec.block_size} is not a multiple of {LANES}"
    if spec.latent % LANES:
        return f"values of {spec.latent} features are not a multiple of {LANES}"
    return why_not_native(spec.head_dim, spec.dtype, spec.device)


class NativeAttention(PagedAttention):
    """One call per layer: stores keys and values, then attends, each thread to its share of sequences and heads.

    It keeps a block's keys and values per head, keys transposed: [num_blocks, num_kv_heads, head_dim, block_size] and
    [num_blocks, num_kv_heads, block_size, head_dim], of a latent cache the keys alone; pairs in tiles.h.
    A token's result has the same bits however its sequence is cut into chunks and whatever else is in the step.
    """

    name = "native"
    reads_unwritten = False

    def __init__(self, spec: AttentionSpec, library: ctypes.CDLL, threads: int) -> None:
        super().__init__(spec)
        self._library = library
        self._threads = threads
        self._parts, self._group = _parts(spec)
        self._tile = max(1, library.best_rows() // self._group)
        self._piece = library.piece_size()
        self._scratch = torch.empty(0)

    @classmethod
    def create(cls, spec: AttentionSpec) -> NativeAttention | None:
        """Return the backend, or None where it cannot be compiled."""
        sizes = spec.head_dim, spec.dtype, spec.block_size, spec.latent
        library = native_library(*sizes)
        if library is not None and not library.may_attend():
            logger.warning("the kernel does not let this process use AMX: attention in bfloat16 is slower")
            library = native_library(*sizes, matrix_unit=False)
        return None if library is None else cls(spec, library, torch.get_num_threads())

    @override
    def prepare(self, step: StepTensors) -> _Metadata:
        tiles = cut(step.layout, self._tile)
        rows = int(tiles[:, 2].max(initial=0)) * self._group
        room = -(-self._library.room_of(rows) // LANES) * LANES
        if len(self._scratch) < self._threads * room:
            self._scratch = torch.empty(self._threads * room)
        threads = self._team(step.layout)
        pieces = -(-int(step.layout.seq_lens.max(initial=0)) // self._piece)
        parts: Tensor | None = None
        if (
            pieces > 1 and len(tiles) * self._parts < threads
        ):  # fewer than threads: each piece of a tile may be another's
            parts = torch.empty(len(tiles) * self._parts * pieces * self._library.part_of(rows))
        pointers = (step.query_start_loc, step.seq_lens, step.block_tables, step.slot_mapping, self._scratch)
        native = AttentionStep(
            tiles.ctypes.data,
            *(tensor.data_ptr() for tensor in pointers),
            None if parts is None else parts.data_ptr(),
            *(len(tiles), len(step.input_ids), step.block_tables.shape[1], room, threads),
            *(self._parts, self._group, min(rows, SIDE), pieces, rows, self.spec.scale, self.spec.softcap),
        )
        return _Metadata(native, tiles, step, self._scratch, parts)

    def _team(self, layout: StepLayout) -> int:
        """Return how many threads the step is worth: waiting for others costs more than a small step itself."""
        pairs = int(np.diff(layout.query_start_loc).astype(np.int64) @ layout.seq_lens)
        products = 2 * pairs * self.spec.num_heads * self.spec.head_dim
        return self._threads if products >= WORTH else 1

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: _Metadata,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], self.spec.value_dim)
        stored = (query, key, key) if self.spec.latent else (query, key, value)
        self._library.attend(
            ctypes.byref(metadata.step),
            *(number for each in stored for number in (heads_address(each, self.spec.dtype), each.stride(0))),
            *(cache.keys.data_ptr(), cache.values.data_ptr(), out.data_ptr(), window),
            None if sinks is None else sinks.data_ptr(),
        )
        return out


def _parts(spec: AttentionSpec) -> tuple[int, int]:
    """Return in how many parts the heads are attended, and the heads of each: those of one key, or some of them."""
    if not spec.latent:
        return spec.num_kv_heads, spec.group
    size = max(size for size in range(1, PART_HEADS + 1) if spec.num_heads % size == 0)
    return spec.num_heads // size, size
