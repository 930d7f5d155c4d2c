"""The call of attention.c, and the proof that a query has the same bits in any company as the compiler made it."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from parallel.c_library import Proof

# Queries of the tiles that are proved: each number of rows that is summed at a time, and some for the matrix unit.
PROVED = (1, 2, 3, 4, 6, 11, 20)
BEFORE = 530  # tokens in front of them: more than a piece of keys


class AttentionStep(ctypes.Structure):
    """`Step` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("tiles", "starts", "lens", "tables", "slots", "scratch", "parts")),
        *((name, c_int64) for name in ("num_tiles", "num_tokens", "table_width", "room", "threads")),
        *((name, c_int64) for name in ("kv_heads", "group", "side", "pieces", "rows")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


def declare(library: ctypes.CDLL) -> None:
    """Say what the functions of attention.c take and return."""
    library.attend.argtypes = (
        *(c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_int, c_void_p),
    )
    library.attend.restype = None
    library.room_of.argtypes = library.part_of.argtypes = (c_int64,)
    library.best_rows.argtypes = library.may_attend.argtypes = library.piece_size.argtypes = ()
    for name in ("room_of", "part_of", "best_rows", "piece_size"):
        getattr(library, name).restype = c_int64


def attention_proof(head_dim: int, dtype: torch.dtype, block_size: int, latent: int) -> Proof:
    """Return what compares queries alone with the same in tiles, and with pieces of their keys apart."""

    def prove(library: ctypes.CDLL) -> str | None:
        declare(library)
        if not library.may_attend():
            return None  # nor will it
        one = ProvedSequence(library, head_dim, dtype, block_size, latent)
        alone = one.attend((1,) * sum(PROVED), False)
        if all(torch.equal(one.attend(PROVED, apart), alone) for apart in (False, True)):
            return None
        return f"a query of {head_dim} features in {dtype} has other bits among others than alone"

    return prove


class ProvedSequence:
    """A sequence with random keys and values, of which the last tokens are attended to."""

    def __init__(self, library: ctypes.CDLL, head_dim: int, dtype: torch.dtype, block_size: int, latent: int) -> None:
        self._library = library
        self._count = sum(PROVED)
        self._blocks = -(-(BEFORE + self._count) // block_size)
        self._width = latent or head_dim
        generator = torch.Generator().manual_seed(0)
        self._cache = torch.randn(2, self._blocks, head_dim * block_size, generator=generator).to(dtype)
        self._qkv = torch.randn(3, self._count, head_dim, generator=generator).to(dtype)
        self._scale = head_dim**-0.5

    def attend(self, tiles: tuple[int, ...], apart: bool) -> Tensor:
        """Attend to the tokens in tiles of so many, each as a sequence of its own. apart: each piece of keys, too."""
        sizes = torch.tensor(tiles, dtype=torch.int32)
        ends = sizes.cumsum(0).int()
        zero = torch.zeros_like(sizes)
        cut = torch.stack((torch.arange(len(tiles), dtype=torch.int32), zero, sizes), 1).contiguous()
        starts, lens = torch.cat((zero[:1], ends)), BEFORE + ends
        tables = torch.arange(self._blocks, dtype=torch.int32).repeat(len(tiles), 1)
        slots = BEFORE + torch.arange(self._count)
        rows, pieces = max(tiles), -(-(BEFORE + self._count) // self._library.piece_size())
        scratch = torch.empty(self._library.room_of(rows))
        parts = torch.empty(len(tiles) * pieces * self._library.part_of(rows))
        query, key, value = (each.data_ptr() for each in self._qkv)
        keys, values = (each.data_ptr() for each in self._cache)
        out, stride = self._qkv.new_empty(self._count, self._width), self._qkv.shape[2]
        pointers = (each.data_ptr() for each in (cut, starts, lens, tables, slots, scratch))
        step = AttentionStep(
            *pointers,
            parts.data_ptr() if apart else None,
            *(len(tiles), self._count, self._blocks, len(scratch), 1),
            *(1, 1, min(rows, 16), pieces, rows, self._scale, 0.0),
        )
        given = (query, stride, key, stride, value, stride)
        self._library.attend(ctypes.byref(step), *given, keys, values, out.data_ptr(), 0, None)
        return out
