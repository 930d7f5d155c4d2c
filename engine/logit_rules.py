"""What changes logits before a token is drawn: bias, bans, masks, penalties. Each row by its own rules alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.report import Ints, SamplingInputs

NEVER = float("-inf")
_BITS = torch.arange(32, dtype=torch.int32)


def changes_logits(inputs: SamplingInputs) -> bool:
    """Whether `apply_rules` would change anything."""
    return bool(inputs.forbidden or inputs.biases or restricts(inputs)) or inputs.prompt_ids is not None


def restricts(inputs: SamplingInputs) -> bool:
    """Whether some row may draw from a given set of tokens only, so that none may be left."""
    return bool(inputs.allowed) or inputs.masks is not None


def apply_rules(logits: Tensor, inputs: SamplingInputs) -> None:
    """Change `logits`, [num_samples, vocab] fp32, in place: bias, allowed and forbidden ids, masks, penalties."""
    for row, (ids, biases) in inputs.biases.items():
        logits[row, _index(ids, logits)] += torch.from_numpy(biases).to(logits.device)
    for row, ids in inputs.allowed.items():
        index = _index(ids, logits)
        kept = logits[row, index]
        logits[row] = NEVER
        logits[row, index] = kept
    if inputs.masks is not None:
        _mask(logits, *inputs.masks())
    if inputs.forbidden:
        rows = [row for row, ids in inputs.forbidden.items() for _ in ids]
        columns = [token for ids in inputs.forbidden.values() for token in ids]
        logits[rows, columns] = NEVER
    _penalise(logits, inputs)


def column(values: NDArray[Any], like: Tensor) -> Tensor:
    """Return `values`, [num_rows], as [num_rows, 1] on the device of `like`."""
    return torch.from_numpy(values).to(like.device)[:, None]


def _index(ids: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(ids).to(like.device).long()


def _mask(logits: Tensor, rows: Ints, bits: Ints) -> None:
    """Forbid in each of `rows` what its bits do not allow. bits: [num_masked, vocab / 32 rounded up]."""
    words = torch.from_numpy(bits).to(logits.device)
    allowed = ((words[:, :, None] >> _BITS.to(logits.device)) & 1).bool().flatten(1)[:, : logits.shape[1]]
    index = _index(rows, logits)
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~allowed, NEVER))


def _penalise(logits: Tensor, inputs: SamplingInputs) -> None:
    """Apply the penalties to the rows that have any. Repetition counts the prompt, the other two do not."""
    repetition, presence, frequency = inputs.repetition_penalty, inputs.presence_penalty, inputs.frequency_penalty
    rows = np.flatnonzero((repetition != 1) | (presence != 0) | (frequency != 0))
    if not rows.size or inputs.prompt_ids is None:
        return
    vocab = logits.shape[1]
    index = torch.from_numpy(rows).to(logits.device)
    # One column more takes what is written for padding.
    work = F.pad(logits.index_select(0, index), (0, 1))
    prompt = _history(inputs.prompt_ids[rows], vocab, logits.device)
    empty = np.empty((len(rows), 0), np.int32)
    output = _history(empty if inputs.output_ids is None else inputs.output_ids[rows], vocab, logits.device)
    repeated, present, frequent = (column(each[rows], logits) for each in (repetition, presence, frequency))
    seen = torch.cat((prompt, output), dim=1)
    value = work.gather(1, seen)
    work.scatter_(1, seen, torch.where(value > 0, value / repeated, value * repeated))
    work.scatter_add_(1, output, -frequent.expand(output.shape))
    work.scatter_(1, output, work.gather(1, output) - present)
    logits.index_copy_(0, index, work[:, :vocab])


def _history(ids: Ints, vocab: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.where(ids < 0, vocab, ids).astype(np.int64)).to(device)
