"""A tensor in memory, read as one of a checkpoint is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor as a `parallel.parameter.WeightSource`."""

    tensor: Tensor

    def get_shape(self) -> Sequence[int]:
        """Return the tensor's shape."""
        return tuple(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]
