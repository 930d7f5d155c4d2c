"""Draws tokens without gathering the vocabulary: each rank looks at its own share, and only the winners travel.

Two exchanges of some bytes per row take the place of the whole logits: the best of each share (with its k best, where
a row is limited to those), then the score of each share's best id. Every value that decides is computed as
`engine.sampling.sampler` computes it from whole rows, so the tokens are the same, ties included, and so are they on
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device.gpu import upload_column
from engine.report import Floats, Ints, SamplingInputs
from engine.sampling.gumbel import RUN, Draws, TokenDraws, best_values, draw_by_gumbel, first_best, row_keys
from engine.sampling.sampler import FAILED
from parallel.group import Group

MOST = 256  # largest top-k whose candidates are exchanged
FEWEST = 16  # rows from which on this pays, as measured between CPU ranks (tests/bench/vocab_gather.py)
COLUMNS = 5  # temperature, min-p, top-k, both halves of the key
NO_DRAWS: Ints = np.zeros((0, COLUMNS), np.int32)


# Draws from a share: own [num_rows, share] (it may be overwritten), temperature [num_rows] fp32, the best logit of
# all shares [num_rows, 1], the least logit / temperature that may be drawn [num_rows, 1] or None, keys [num_rows]
# int64, the first run of the share -> the score that each row's run won with, [num_rows] fp64, and the id's column.
Race = Callable[[Tensor, Tensor, Tensor, "Tensor | None", Tensor, int], tuple[Tensor, Tensor]]


def unpack_draws(packed: Ints) -> Draws:
    """Read what `pack_draws` wrote."""
    columns = np.ascontiguousarray(packed.T)
    keys = np.ascontiguousarray(packed[:, 3:]).view(np.int64)[:, 0]
    return Draws(columns[0].view(np.float32), columns[1].view(np.float32), columns[2], keys)


def pack_draws(sampling: SamplingInputs, device: torch.device) -> Ints:
    """Return how the ranks are to draw from their shares, [num_samples, COLUMNS], or nothing where they must gather.

    They gather few rows, which cost less than two exchanges; rows with log-probabilities, rules that change logits,
    top-p (whose sum is over the whole vocabulary) or a top-k above `MOST`; on a GPU, whose kernels look for
    thresholds in whole rows, those with any filter; and whatever is drawn beside those.
    """
    drawn = sampling.temperature != 0
    if len(drawn) < FEWEST:
        return NO_DRAWS
    if device.type != "cpu" and (drawn & ((sampling.top_k > 0) | (sampling.min_p > 0))).any():
        return NO_DRAWS
    if sampling.num_logprobs >= 0 or sampling.prompt is not None or sampling.changes_logits:
        return NO_DRAWS
    if (drawn & ((sampling.top_p < 1) | (sampling.top_k > MOST))).any():
        return NO_DRAWS
    packed = np.empty((len(drawn), COLUMNS), np.int32)
    packed[:, 0] = sampling.temperature.view(np.int32)
    packed[:, 1] = sampling.min_p.view(np.int32)
    packed[:, 2] = sampling.top_k
    packed[:, 3:] = row_keys(sampling.seeds, sampling.choices, sampling.positions)[:, None].view(np.int32)
    return packed


class OutputHead(Protocol):
    """What turns rows into logits, on one rank: a model from hidden states, or what is left to do of one."""

    vocab_size: int
    group: Group

    def logits(self, hidden: Tensor, /) -> Tensor:
        """See `CausalLM.logits`."""

    def own_logits(self, hidden: Tensor, /) -> Tensor:
        """See `CausalLM.own_logits`."""


def draw_apart(model: OutputHead, hidden: Tensor, packed: Ints, most: int, draws: TokenDraws | None = None) -> Tensor:
    """Return the tokens of all rows, each rank having drawn from its share of the logits of `most` rows at a time.

    hidden: [num_rows, hidden]; packed: of those rows, from `pack_draws`. draws: what draws from whole rows on this
    device, None for `engine.sampling.sampler`. Returns as `draw` does.
    """
    pieces = []
    for at in range(0, len(packed), most):
        own, asked = model.own_logits(hidden[at : at + most]), unpack_draws(packed[at : at + most])
        if draws is not None and asked.temperature.any():
            drawn = draws.draw_share(own, asked, model.vocab_size, model.group)
        else:
            drawn = draw_shares(own, asked, model.vocab_size, model.group)
        pieces.append(drawn)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def draw_shares(own: Tensor, draws: Draws, vocab: int, group: Group, race: Race | None = None) -> Tensor:
    """Return one token per row on every rank, [num_rows] int32, `FAILED` where there is none.

    race: what draws from a share, None for torch's operations; what it draws in whole rows must be the same.
    own: this rank's logits, [num_rows, share], contiguous, -inf for padding; a share is a multiple of `RUN`. They
    may be overwritten. vocab: ids without padding.
    """
    rows = np.flatnonzero(draws.temperature)
    if rows.size or own.device.type == "cpu":
        own = own.float()  # of others only the best count, which a GPU finds as fast in 16 bits
    limits = _limits(draws, vocab)
    peaks = own.view(len(own), -1, RUN).amax(dim=-1)
    bests, ids, candidates = _exchange_best(own, peaks, int(limits[rows].max(initial=0)), group)
    first = bests.argmax(dim=-1, keepdim=True)
    most, tokens = bests.gather(1, first), ids.gather(1, first)[:, 0]
    if rows.size:
        index = torch.from_numpy(rows).to(own.device)
        field = (own, most, candidates)
        if len(rows) < len(own):
            field = (own[index], most[index], candidates[index])
        tokens = tokens.index_copy(0, index, _drawn(*field, draws, rows, limits, group, race or _race))
    return tokens.where(most.isfinite()[:, 0], FAILED).to(torch.int32)


def _limits(draws: Draws, vocab: int) -> Ints:
    """Return each row's top-k, 0 where it limits nothing."""
    whole = -(-vocab // RUN) * RUN
    return np.where((draws.top_k > 0) & (draws.top_k < whole), draws.top_k, 0).astype(np.int32)


def _drawn(
    own: Tensor,
    most: Tensor,
    candidates: Tensor,
    draws: Draws,
    rows: NDArray[np.intp],
    limits: Ints,
    group: Group,
    race: Race,
) -> Tensor:
    """Return the tokens of the rows that are drawn at random; own, most and candidates are of those alone."""
    temperature = upload_column(draws.temperature[rows], own)
    least = None
    if draws.min_p[rows].any() or limits[rows].any():
        least = _least(most / temperature, candidates / temperature, draws.min_p[rows], limits[rows])
    keys = torch.from_numpy(draws.keys[rows]).to(own.device)
    first_run = group.rank * own.shape[1] // RUN
    scores, ids = race(own, temperature[:, 0], most, least, keys, first_run)
    return _exchange_winners(scores, ids + first_run * RUN, group)


def _race(
    own: Tensor, temperature: Tensor, most: Tensor, least: Tensor | None, keys: Tensor, first_run: int
) -> tuple[Tensor, Tensor]:
    logits = own.div_(temperature[:, None])
    return draw_by_gumbel(logits, (logits - most / temperature[:, None]).exp_(), least, keys, first_run)


def _least(most: Tensor, candidates: Tensor, min_p: Floats, limits: Ints) -> Tensor:
    """Return the least logit that each row may draw, [num_rows, 1]. candidates: the best of all shares."""
    with np.errstate(divide="ignore"):
        least = most + upload_column(np.log(min_p), most)
    if not limits.any():
        return least
    rank = upload_column(limits.astype(np.int64).clip(min=1) - 1, most)
    kth = candidates.topk(int(limits.max()), dim=-1).values.gather(1, rank).maximum(least)
    return torch.where(upload_column(limits > 0, most), kth, least)


def _exchange_best(own: Tensor, peaks: Tensor, limit: int, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return each share's best logit and the lowest id that has it, [num_rows, size], and its `limit` best logits.

    The last: [num_rows, size * limit]. A NaN counts as best.
    """
    best = first_best(own, peaks)[:, None]
    values = best_values(own, peaks, min(limit, own.shape[1])) if limit else own[:, :0]
    values = torch.cat((own.gather(1, best), values), dim=-1).float()
    ids = (best + group.rank * own.shape[1]).to(torch.int32)
    joined = _gather(torch.cat((ids, values.view(torch.int32)), dim=-1), group)  # bits of both in one exchange
    found = joined[:, :, 1:].contiguous().view(torch.float32)
    return found[:, :, 0], joined[:, :, 0].long(), found[:, :, 1:].flatten(1)


def _exchange_winners(scores: Tensor, ids: Tensor, group: Group) -> Tensor:
    """Return the id of the best score of all shares, the first share's of equals. [num_rows]."""
    joined = _gather(torch.stack((scores, ids.double()), dim=-1), group)  # an id fits 53 bits many times over
    won = joined[:, :, 0].argmax(dim=-1, keepdim=True)
    return joined[:, :, 1].gather(1, won)[:, 0].long()


def _gather(mine: Tensor, group: Group) -> Tensor:
    """[num_rows, n] -> [num_rows, size, n]."""
    return group.all_gather(mine).view(len(mine), group.size, -1)
