"""Tokens that a step drew, handed to the next one on the device: that was launched before the host knew them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.device.gpu import upload
from engine.report import Ints
from parallel.group import Group


class TokenFeedback:
    """The tokens that the last step drew. All ranks must `fill` alike: rank 0, which draws, sends them on."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._drawn: Tensor | None = None

    def keep(self, token_ids: Tensor) -> None:
        """Remember what a step drew, [num_samples] int32; negative where it has no token. On rank 0."""
        self._drawn = token_ids

    def fill(self, input_ids: Tensor, carried: Ints) -> None:
        """Write the tokens of the last step into `input_ids`, [num_tokens] int32. carried: `StepInputs.carried`."""
        count = len(carried)
        if not count:
            return
        in_order = bool((carried == np.arange(count)[:, None]).all())  # a decode step after another
        pairs = None if in_order else upload([carried.T.astype(np.int64)], input_ids.device)[0]
        if self._drawn is None:
            ids = torch.empty(count, dtype=torch.int32, device=input_ids.device)
        else:
            ids = self._drawn[:count] if pairs is None else self._drawn.index_select(0, pairs[1])
            ids = ids.clamp(min=0)  # a row without a token is not read
        ids = self._group.broadcast(ids)
        if pairs is None:
            input_ids[:count] = ids
        else:
            input_ids.index_copy_(0, pairs[0], ids)
