"""A way of drawing tokens that suits one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.report import Floats, SamplingInputs
from parallel.group import Group

Longs = NDArray[np.int64]


class TokenDraws(ABC):
    """Draws from logits, [num_samples, vocab], without waiting for the device; each row by itself.

    They may be in 16 bits, but for `forbid`: what is drawn is what would be of the same in fp32.
    Rows of logits may lie apart, the ids of a row may not. What may be drawn and the noise that decides are those of
    `engine.sampling.sampler`.
    """

    @abstractmethod
    def forbid(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Write -inf over what is not allowed in `rows`, [num_masked] int32. logits: fp32.

        bits: [num_masked, vocab / 32 rounded up] int32, a bit per allowed id, the lowest first.
        """

    @abstractmethod
    def draw(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Return a token per row, [num_samples] int32; -1 where the best logit is NaN or infinite."""

    @abstractmethod
    def draw_share(self, own: Tensor, temperature: Floats, keys: Longs, vocab: int, group: Group) -> Tensor:
        """Return what `draw` would of the ranks' shares of the logits, without filters; alike on every rank.

        own: this rank's share, [num_samples, share], a whole number of runs, -inf for padding. vocab: ids without it.
        temperature, keys: [num_samples]; keys from `engine.sampling.noise.row_keys`.
        """
