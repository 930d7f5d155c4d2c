"""Triton's interpreter (3.7) made as exact as a GPU with bfloat16 and float8.

It multiplies the bits of bfloat16 as if they were integers, and cuts off what conversions should round.
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
    """Kernels that run inside round to nearest even, and sum products of bfloat16 and float8 in fp32."""
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def dot(self, a, b, d, *settings):
        return create_dot(self, _widened(a), _widened(b), d, *settings)

    with mock.patch.object(builder, "create_dot", dot), mock.patch.object(interpreter, "_convert_float", _convert):
        yield


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding: object) -> np.ndarray:
    kinds = KINDS[source], KINDS[target]
    bits = torch.from_numpy(np.ascontiguousarray(data)).view(kinds[0])
    return bits.to(kinds[1]).view(BITS[kinds[1].itemsize]).numpy()


def _widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    if handle.dtype.scalar is not tl.bfloat16:
        return handle
    return interpreter.TensorHandle(_convert(handle.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)
