"""Several arrays to a device in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes: any dtype can be viewed there, and kernels load whole vectors


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on `device`; on CPU they share the arrays' memory.

    On CUDA they share one buffer, copied from pinned memory behind what is queued on the current stream. The arrays
    may be written to again at once.
    """
    if device.type != "cuda":
        return [torch.from_numpy(each) for each in arrays]
    packed = pack(arrays, torch.empty(packed_size(arrays), dtype=torch.uint8, pin_memory=True))
    return unpack(packed.to(device, non_blocking=True), arrays)


def packed_size(arrays: Sequence[NDArray[Any]]) -> int:
    """Return the bytes that `arrays` take in a buffer."""
    return sum(map(_room, arrays))


def pack(arrays: Sequence[NDArray[Any]], buffer: Tensor) -> Tensor:
    """Write the arrays one after another into `buffer`, [packed_size] bytes on the host, and return it."""
    flat, start = buffer.numpy(), 0
    for each in arrays:
        flat[start : start + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
        start += _room(each)
    return buffer


def unpack(buffer: Tensor, like: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return the tensors that lie in `buffer` as `pack` wrote arrays of these shapes and dtypes."""
    found, start = [], 0
    for each in like:
        dtype = torch.from_numpy(np.empty(0, each.dtype)).dtype
        found.append(buffer[start : start + each.nbytes].view(dtype).view(each.shape))
        start += _room(each)
    return found


def _room(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT
