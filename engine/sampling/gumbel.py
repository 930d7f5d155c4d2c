"""Gumbel sampling over a vocabulary or one rank's share of it: its noise, its passes, and who makes them on a device.

*Noise.* Random numbers depend on nothing but their key, (seed, choice, position) of a token, and an index. There is
no generator and no state: a request draws the same tokens alone, in any batch, on any replica and after a migration.
The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators"),
in int64 arithmetic that wraps alike on CPU and CUDA.

*Passes.* Whole-vocabulary passes are what sampling costs on a CPU, so there are few: the vocabulary is looked at in
runs of neighbouring ids, by their peaks (to find the best) and their masses (to draw), and only then id by id.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.report import Floats, Ints, SamplingInputs
from engine.sampling.logit_rules import NEVER
from parallel.group import Group

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

Unsigned = NDArray[np.uint64]


def row_keys(seeds: NDArray[np.int64], choices: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return one well-mixed 64-bit key per row; all arrays are [num_rows]."""
    key = _mix_host(seeds.astype(np.int64).view(np.uint64))
    for part in (choices, positions):
        key = _mix_host(key + part.astype(np.uint64))
    return key.view(np.int64)


def gumbel(keys: Tensor, indices: Tensor) -> Tensor:
    """Return fp64 Gumbel noise: keys [num_rows] int64, indices [num_rows or 1, n] int64 -> [num_rows, n].

    Uniforms have 53 bits, so that the largest values, which decide, are not rounded into ties.
    """
    bits = _mix(keys[:, None] + (indices + 1) * _signed(GOLDEN))
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _mix_host(x: Unsigned) -> Unsigned:
    with np.errstate(over="ignore"):
        x = x + np.uint64(GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(MIX_2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it a logical shift.
    return torch.bitwise_and(x >> bits, (1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


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


def draw_by_gumbel(
    logits: Tensor, weights: Tensor, least: Tensor | None, keys: Tensor, first_run: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw one id per row, among the logits of at least `least`, by Gumbel-max; keys: [num_rows].

    logits, weights: [num_rows, n] of neighbouring ids, whose first run is `first_run` of the vocabulary; weights are
    overwritten. Returns the score that each row's run won with, [num_rows] fp64, and the id's column, [num_rows].
    Several shares of a vocabulary draw as the whole does: the share with the best score has the id, the first of
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


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row is drawn: what every rank must know of `SamplingInputs`. [num_rows] each.

    keys: of `row_keys`.
    """

    temperature: Floats
    min_p: Floats
    top_k: Ints
    keys: NDArray[np.int64]


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
    def draw_share(self, own: Tensor, draws: Draws, vocab: int, group: Group) -> Tensor:
        """Return what `draw` would of the ranks' shares of the logits; alike on every rank.

        own: this rank's share, [num_samples, share], a whole number of runs, -inf for padding; it may be overwritten.
        vocab: ids without it. Raises `ValueError` for filters that are looked for in whole rows on this device.
        """

    def score(
        self, logits: Tensor, tokens: Tensor, count: int, ranked: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
        """Return what `engine.sampling.sampler.score` does, part by part; None = torch's operations are to do it.

        tokens: [num] int64. Of equal logits the lowest ids are told.
        """
        return None
