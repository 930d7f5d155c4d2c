"""What a tensor on disk looks like to a parameter. Needs no torch: a router reads checkpoints too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """One tensor on disk, read by slices; what safetensors' `get_slice` returns fits."""

    def get_shape(self) -> Sequence[int]:
        """Return the shape of the whole tensor on disk."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the part that a slice or a tuple of slices selects."""
