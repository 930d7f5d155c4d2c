"""Chooses tokens from logits. Each row's token is a function of its own logits, parameters and key alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.device.gpu import upload, upload_column
from engine.report import Floats, Ints, SamplingInputs
from engine.sampling.device_rules import DeviceRules
from engine.sampling.gumbel import RUN, TokenDraws, best_values, draw_by_gumbel, first_best, log_sum_exp, row_keys
from engine.sampling.logit_rules import NEVER, apply_rules, forbid, of_rows, ruled_rows
from engine.sampling_params import MAX_LOGPROBS

# Instead of a token, where a row has none:
FAILED = -1  # its logits were NaN or infinite
STUCK = -2  # its rules left it no token


@dataclass(slots=True)
class DeviceLogprobs:
    """`Logprobs` on the device."""

    chosen: Tensor  # [num] fp32
    top_ids: Tensor  # [num, k] int32
    top: Tensor  # [num, k] fp32
    ranks: Tensor | None = None  # [num] int32
    whole_rows: NDArray[np.int64] | None = None  # [num_whole], on the host
    whole: Tensor | None = None  # [num_whole, vocab] fp32


@dataclass(slots=True)
class DeviceOutputs:
    """`StepOutputs` on the device. Nobody writes to these tensors any more."""

    token_ids: Tensor  # [num_samples] int32; FAILED or STUCK where there is no token
    logprobs: DeviceLogprobs | None = None
    prompt_logprobs: DeviceLogprobs | None = None
    pooled: Tensor | None = None  # [num_pooled, hidden] fp32


# Best logits looked at when a row's top-p set is searched; rows that need more look at `MORE` times as many.
CANDIDATES = 64
MORE = 16


def sample(
    logits: Tensor, inputs: SamplingInputs, draws: TokenDraws | None = None, rules: DeviceRules | None = None
) -> DeviceOutputs:
    """Choose one token per row of `logits`, [num_samples, vocab], which may be overwritten.

    Order as in vLLM: bias, allowed and forbidden ids, penalties, temperature, min-p, top-k, top-p. Log-probabilities
    are those of the logits as they came. Rows whose best logit came NaN or infinite get FAILED for a token, whatever
    their rules make of it; rows whose rules leave them none STUCK.

    draws: made for the device; without them torch's operations serve, which wait for the device where top-p is set.
    Logits in 16 bits are widened by what draws, as it reads them; for all else here there is a copy in fp32.
    rules: see `apply_rules`; nothing is kept for another step without them.
    """
    rules = rules or DeviceRules()
    if draws is not None and logits.device.type == "cpu" and inputs.changes_logits:
        rows = ruled_rows(inputs)
        if rows is not None and len(rows) < len(logits):
            return _sample_apart(logits, inputs, rows, draws, rules)
    wants_logprobs = inputs.num_logprobs >= 0
    changed = inputs.changes_logits
    if changed or wants_logprobs or draws is None:
        logits = logits.float()
    overwritten = changed or (draws is None and not inputs.all_greedy)
    raw = logits.clone() if wants_logprobs and overwritten else logits
    came_sound = logits.amax(dim=-1).isfinite() if changed else None
    if changed:
        apply_rules(logits, inputs, draws.forbid if draws else forbid, rules)
    drawn = draws.draw(logits, inputs) if draws else _drawn(logits, inputs)
    logprobs = _scored(raw, drawn, inputs, draws)
    if came_sound is not None:
        drawn = drawn.where(drawn >= 0, STUCK).where(came_sound, FAILED)
    return DeviceOutputs(drawn, logprobs)


def _sample_apart(
    logits: Tensor, inputs: SamplingInputs, rows: NDArray[np.int64], draws: TokenDraws, rules: DeviceRules
) -> DeviceOutputs:
    """`sample`, where rules change the logits of some `rows` alone: only these are copied."""
    drawn = draws.draw(logits, inputs)
    if rows.size:
        (index,) = upload([rows], logits.device)
        ruled = sample(logits.index_select(0, index), of_rows(inputs, rows, rules), draws, rules)
        drawn.index_copy_(0, index, ruled.token_ids)
    return DeviceOutputs(drawn, _scored(logits, drawn, inputs, draws))


def _scored(logits: Tensor, drawn: Tensor, inputs: SamplingInputs, draws: TokenDraws | None) -> DeviceLogprobs | None:
    if inputs.num_logprobs < 0:
        return None
    found = score(logits, drawn.clamp(min=0).long(), inputs.num_logprobs, draws=draws)
    if inputs.whole_rows.size:
        rows = logits.index_select(0, upload([inputs.whole_rows], logits.device)[0]).float()
        found.whole_rows, found.whole = inputs.whole_rows, rows - _finite(log_sum_exp(rows))
    return found


def _drawn(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return the tokens, [num_samples] int32, FAILED where the best logit is NaN or infinite."""
    logits = F.pad(logits, (0, -logits.shape[1] % RUN), value=NEVER) if logits.shape[1] % RUN else logits.contiguous()
    peaks = logits.view(len(logits), -1, RUN).amax(dim=-1)
    best = first_best(logits, peaks)
    sound = logits.gather(1, best[:, None]).isfinite()[:, 0]
    tokens = best if inputs.all_greedy else _draw(logits, peaks, best, inputs)
    return tokens.where(sound, FAILED).to(torch.int32)


def score(
    logits: Tensor, tokens: Tensor, count: int, ranked: bool = False, draws: TokenDraws | None = None
) -> DeviceLogprobs:
    """Return the log-probabilities of `tokens`, [num] int64, and of the `count` best. logits: [num, vocab].

    ranked: and the ranks of `tokens`: how many of the vocabulary are at least as likely, as vLLM counts them. Figures
    of a row whose best logit is NaN or infinite are all NaN; -inf is a token that the model rules out.
    """
    found = None if draws is None else draws.score(logits, tokens, count, ranked)
    if found is not None:
        return DeviceLogprobs(*found)
    logits = logits.float()
    total = _finite(log_sum_exp(logits))
    # How many are looked for decides which of equals are found: always as many, whatever others in the batch want.
    values, ids = logits.topk(min(MAX_LOGPROBS if count else 0, logits.shape[1]), dim=-1)
    own = logits.gather(1, tokens[:, None])
    ranks = torch.count_nonzero(logits >= own, dim=-1).to(torch.int32) if ranked else None
    return DeviceLogprobs((own - total)[:, 0], ids[:, :count].to(torch.int32), values[:, :count] - total, ranks)


def _finite(total: Tensor) -> Tensor:
    return total.where(total.isfinite(), torch.nan)


@dataclass(slots=True)
class _Weighted:
    """The rows that are drawn at random, after temperature.

    logits: [num_rows, vocab]; peaks: the largest of each run before temperature, [num_rows, vocab / RUN];
    most: each row's largest logit, [num_rows, 1]; weights: exp(logits - most), [num_rows, vocab].
    """

    logits: Tensor
    peaks: Tensor
    most: Tensor
    weights: Tensor

    def rows(self, index: Tensor) -> _Weighted:
        """Return some of the rows; all of them without a copy."""
        if len(index) == len(self.logits):
            return self
        return _Weighted(
            *(each.index_select(0, index) for each in (self.logits, self.peaks, self.most, self.weights))
        )


def _draw(logits: Tensor, peaks: Tensor, best: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return the tokens of all rows, `best` where temperature is 0."""
    rows = np.flatnonzero(inputs.temperature)
    (index,) = upload([rows], logits.device)
    if len(rows) < len(logits):
        logits, peaks = logits.index_select(0, index), peaks.index_select(0, index)
    logits = logits.div_(upload_column(inputs.temperature[rows], logits))
    most = logits.gather(1, best[index, None])
    field = _Weighted(logits, peaks, most, (logits - most).exp_())
    least = _threshold(field, inputs.min_p[rows], inputs.top_k[rows], inputs.top_p[rows])
    keys = row_keys(inputs.seeds[rows], inputs.choices[rows], inputs.positions[rows])
    _, ids = draw_by_gumbel(field.logits, field.weights, least, upload([keys], logits.device)[0])
    return best.index_copy(0, index, ids)


def _threshold(field: _Weighted, min_p: Floats, top_k: Ints, top_p: Floats) -> Tensor | None:
    """Return the least logit that each row may draw, [num_rows, 1]; None when no row is filtered.

    Ties with the least are kept, so that a row does not depend on how anybody sorts.
    """
    limited = (top_k > 0) & (top_k < field.logits.shape[1])
    rows = np.flatnonzero(limited | (top_p < 1))
    if not rows.size and not min_p.any():
        return None
    with np.errstate(divide="ignore"):
        least = field.most + upload_column(np.log(min_p), field.most)
    if not rows.size:
        return least
    (index,) = upload([rows], least.device)
    limited, top_k, top_p = limited[rows], top_k[rows], top_p[rows]
    some = field.rows(index)
    mine = least[index]
    if limited.any():
        mine = _top_k(some, mine, limited, top_k)
    if (top_p < 1).any():
        mine = _top_p(some, mine, upload_column(top_p, mine), min(CANDIDATES, some.logits.shape[1]))
    return least.index_copy(0, index, mine)


def _top_k(field: _Weighted, least: Tensor, limited: NDArray[np.bool_], top_k: Ints) -> Tensor:
    """Raise `least` to the k-th best logit in the rows that are limited."""
    rank = np.where(limited, top_k, 1).astype(np.int64) - 1
    values = best_values(field.logits, field.peaks, int(rank.max()) + 1)
    kth = values.gather(1, upload_column(rank, least)).maximum(least)
    return torch.where(upload_column(limited, least), kth, least)


def _top_p(field: _Weighted, least: Tensor, top_p: Tensor, count: int) -> Tensor:
    """Raise `least` to the lowest logit of the smallest set of best tokens whose mass reaches top_p.

    least: what earlier filters left, [num_rows, 1]; count: how many of the best are looked at first.
    """
    wanted = (field.weights * (field.logits >= least)).sum(dim=-1, keepdim=True).double() * top_p
    values = best_values(field.logits, field.peaks, count)
    mass = ((values - field.most).exp_() * (values >= least)).double()
    inside = (mass.cumsum(dim=-1) - mass < wanted) & (values >= least)
    last = values.gather(1, (inside.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)).maximum(least)
    last = torch.where(top_p < 1, last, least)
    # Where even the last one looked at is inside, the set may go on.
    unsure = torch.nonzero(inside[:, -1] & (top_p[:, 0] < 1))[:, 0]
    if count < field.logits.shape[1] and len(unsure):
        more = min(count * MORE, field.logits.shape[1])
        last[unsure] = _top_p(field.rows(unsure), least[unsure], top_p[unsure], more)
    return last
