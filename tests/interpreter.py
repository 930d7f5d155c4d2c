"""Triton's interpreter (3.7) made as exact as a GPU with bfloat16 and float8.

It multiplies the bits of bfloat16 as if they were integers, and cuts off what conversions should round. Operands are
float32, bfloat16 or float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

KINDS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}


@contextmanager
def exact_halves() -> Iterator[None]:
    """Kernels that run inside round to nearest even; products of a tile are exact, so that no row's bits depend on
    where it lies in the tile, as those of numpy's products do.
    """

    def dot(self, a, b, d, *settings):
        exact = np.matmul(_exact(a), _exact(b))
        return interpreter.TensorHandle(exact.astype(d.data.dtype) + d.data, d.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    with mock.patch.object(builder, "create_dot", dot), mock.patch.object(interpreter, "_convert_float", _convert):
        yield


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding: object) -> np.ndarray:
    kinds = KINDS[source], KINDS[target]
    bits = torch.from_numpy(np.ascontiguousarray(data)).view(kinds[0])
    return bits.to(kinds[1]).view(BITS[kinds[1].itemsize]).numpy()


def _exact(handle: interpreter.TensorHandle) -> np.ndarray:
    kind = handle.dtype.scalar
    if kind is tl.bfloat16:
        return _convert(handle.data, kind, tl.float32, None).view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)
