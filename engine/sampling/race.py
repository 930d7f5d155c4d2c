"""The passes over a vocabulary that drawing is made of, for a whole vocabulary or one rank's share of it.

Whole-vocabulary passes are what sampling costs on a CPU, so there are few: the vocabulary is looked at in runs of
neighbouring ids, by their peaks (to find the best) and their masses (to draw), and only then id by id.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.sampling.logit_rules import NEVER
from engine.sampling.noise import gumbel

RUN = 64
# Where the runs' indices begin in the noise of a row, beyond all token ids.
RUN_INDEX = 1 << 32


def first_best(logits: Tensor, peaks: Tensor) -> Tensor:
    """Return each row's best id, the lowest of equals; a NaN counts as best."""
    ids = _members(peaks.argmax(dim=-1, keepdim=True))
    return ids.gather(1, logits.gather(1, ids).argmax(dim=-1, keepdim=True))[:, 0]


def best_values(logits: Tensor, peaks: Tensor, count: int) -> Tensor:
    """Return the `count` largest logits of each row, sorted; they lie in the runs with the largest peaks."""
    if 2 * count < peaks.shape[1]:
        logits = logits.gather(1, _members(peaks.topk(count, dim=-1, sorted=False).indices))
    return logits.topk(count, dim=-1).values


def run_race(
    logits: Tensor, weights: Tensor, least: Tensor | None, keys: Tensor, first_run: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw one id per row, among the logits of at least `least`, by Gumbel-max; keys: [num_rows].

    logits, weights: [num_rows, n] of neighbouring ids, whose first run is `first_run` of the vocabulary; weights are
    overwritten. Returns the score that each row's run won with, [num_rows] fp64, and the id's column, [num_rows].
    Several shares of a vocabulary race as the whole does: the share with the best score has the id, the first of
    equals.

    First a run is drawn by its mass, then an id within it. By the chain rule of probabilities the result is
    distributed as if every id of the vocabulary had noise of its own, at a fraction of the cost.
    """
    if least is not None:
        weights = weights.mul_(logits >= least)
    mass = weights.view(len(weights), -1, RUN).sum(dim=-1).double().log_()
    runs = torch.arange(mass.shape[1], device=mass.device)
    scores = mass + gumbel(keys, runs[None] + (first_run + RUN_INDEX))
    winner = scores.argmax(dim=-1, keepdim=True)
    ids = _members(winner)
    within = logits.gather(1, ids)
    if least is not None:
        within.masked_fill_(within < least, NEVER)
    inner = (within.double() + gumbel(keys, ids + first_run * RUN)).argmax(dim=-1, keepdim=True)
    return scores.gather(1, winner)[:, 0], ids.gather(1, inner)[:, 0]


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return log(sum(exp(x))) of each row, [num_rows, 1], whose bits do not depend on the number of rows.

    On a CPU torch sums each row alike; on a GPU it shares a row out among more threads when there are few.
    """
    return logits.logsumexp(dim=-1, keepdim=True) if logits.device.type == "cpu" else by_halves(logits)


def by_halves(logits: Tensor) -> Tensor:
    """`log_sum_exp` by adding one half of each row to the other until a column is left."""
    most = logits.amax(dim=-1, keepdim=True)
    sums = (logits - most).exp_()
    while sums.shape[1] > 1:
        if sums.shape[1] % 2:
            sums = F.pad(sums, (0, 1))
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return most + sums.log_()


def _members(runs: Tensor) -> Tensor:
    """Return the ids in some runs of each row: [num_rows, n] -> [num_rows, n * RUN]."""
    return (runs[:, :, None] * RUN + torch.arange(RUN, device=runs.device)).flatten(1)
