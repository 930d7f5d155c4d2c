"""Chooses tokens from logits. Each row's token is a function of its own logits, parameters and key alone."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.noise import gumbel, row_keys
from engine.report import Floats, Ints, Logprobs, SamplingInputs, StepOutputs

# Tokens are drawn in two races: one among runs of this many neighbouring ids, one within the winning run.
RUN = 128
# Best tokens looked at when a row's top-p set is searched; rows that need more are sorted whole.
CANDIDATES = 256
# Where the runs' indices begin in the noise of a row, beyond all token ids.
RUN_INDEX = 1 << 32
NEVER = float("-inf")


def sample(logits: Tensor, inputs: SamplingInputs) -> StepOutputs:
    """Choose one token per row of `logits`, [num_samples, vocab] fp32, which may be overwritten.

    Order as in vLLM: forbidden ids, penalties, temperature, min-p, top-k, top-p. Log-probabilities are those of the
    logits as they came. Rows whose best logit is NaN or infinite are named in `failed`.
    """
    wants_logprobs = inputs.num_logprobs >= 0
    raw = logits.clone() if wants_logprobs and not _keeps_logits(inputs) else logits
    _forbid(logits, inputs)
    _penalise(logits, inputs)
    best = logits.argmax(dim=-1)
    sound = logits.gather(1, best[:, None]).isfinite()[:, 0]
    tokens = best if inputs.all_greedy else _draw(logits, best, inputs)
    chosen = tokens.where(sound, -1)
    logprobs = _logprobs(raw, chosen.clamp(min=0), inputs.num_logprobs) if wants_logprobs else None
    token_ids = chosen.to(torch.int32).cpu().numpy()
    return StepOutputs(token_ids.clip(min=0), logprobs, tuple(np.flatnonzero(token_ids < 0).tolist()))


def _keeps_logits(inputs: SamplingInputs) -> bool:
    return inputs.all_greedy and not inputs.forbidden and inputs.prompt_ids is None


def _forbid(logits: Tensor, inputs: SamplingInputs) -> None:
    if inputs.forbidden:
        rows = [row for row, ids in inputs.forbidden.items() for _ in ids]
        columns = [token for ids in inputs.forbidden.values() for token in ids]
        logits[rows, columns] = NEVER


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
    column = [_column(each[rows], logits) for each in (repetition, presence, frequency)]
    seen = torch.cat((prompt, output), dim=1)
    value = work.gather(1, seen)
    work.scatter_(1, seen, torch.where(value > 0, value / column[0], value * column[0]))
    work.scatter_add_(1, output, -column[2].expand(output.shape))
    work.scatter_(1, output, work.gather(1, output) - column[1])
    logits.index_copy_(0, index, work[:, :vocab])


def _history(ids: Ints, vocab: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.where(ids < 0, vocab, ids).astype(np.int64)).to(device)


def _column(values: Floats | NDArray[np.bool_], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _draw(logits: Tensor, best: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return the tokens of all rows, `best` where temperature is 0."""
    rows = np.flatnonzero(inputs.temperature)
    index = torch.from_numpy(rows).to(logits.device)
    if len(rows) < len(logits):
        logits = logits.index_select(0, index)
    logits = logits.div_(_column(inputs.temperature[rows], logits))
    most = logits.gather(1, best[index, None])
    threshold = _threshold(logits, most, inputs.min_p[rows], inputs.top_k[rows], inputs.top_p[rows])
    if threshold is not None:
        logits = logits.masked_fill_(logits < threshold, NEVER)
    keys = row_keys(inputs.seeds[rows], inputs.choices[rows], inputs.positions[rows])
    return best.index_copy(0, index, _race(logits, most, torch.from_numpy(keys).to(logits.device)))


def _race(logits: Tensor, most: Tensor, keys: Tensor) -> Tensor:
    """Draw one id per row from softmax(logits) by Gumbel-max: first a run of ids by its mass, then an id within.

    logits: [num_rows, vocab]; most: each row's largest, [num_rows, 1]; keys: [num_rows]. Both races follow from the
    chain rule of probabilities, so the result is distributed as if every id had its own noise, at a fraction of it.
    """
    count, vocab = logits.shape
    if vocab % RUN:
        logits = F.pad(logits, (0, -vocab % RUN), value=NEVER)
    mass = (logits - most).exp_().reshape(count, -1, RUN).sum(dim=-1).double().log_()
    runs = torch.arange(mass.shape[1], device=logits.device)
    run = (mass + gumbel(keys, runs[None] + RUN_INDEX)).argmax(dim=-1)
    ids = run[:, None] * RUN + torch.arange(RUN, device=logits.device)
    within = logits.gather(1, ids).double() + gumbel(keys, ids)
    return ids.gather(1, within.argmax(dim=-1, keepdim=True))[:, 0]


def _threshold(logits: Tensor, most: Tensor, min_p: Floats, top_k: Ints, top_p: Floats) -> Tensor | None:
    """Return the least logit that each row may draw, [num_rows, 1]; None when no row is filtered.

    Ties with the least are kept, so that a row does not depend on how anybody sorts.
    """
    vocab = logits.shape[1]
    limited = (top_k > 0) & (top_k < vocab)
    rows = np.flatnonzero(limited | (top_p < 1))
    if not rows.size and not min_p.any():
        return None
    with np.errstate(divide="ignore"):
        threshold = most + _column(np.log(min_p), logits)
    if not rows.size:
        return threshold
    index = torch.from_numpy(rows).to(logits.device)
    some = logits if len(rows) == len(logits) else logits.index_select(0, index)
    count = min(vocab, max(CANDIDATES, int(top_k[rows].max(where=limited[rows], initial=1))))
    found = some.topk(count, dim=-1).values
    least = threshold[index]
    if limited.any():
        last = np.where(limited[rows], top_k[rows], count).astype(np.int64) - 1
        kth = found.gather(1, torch.from_numpy(last).to(logits.device)[:, None])
        least = torch.where(_column(limited[rows], logits), kth.maximum(least), least)
    if (top_p < 1).any():
        least = _nucleus(some, found, most[index], least, _column(top_p[rows], logits))
    return threshold.index_copy(0, index, least)


def _nucleus(logits: Tensor, found: Tensor, most: Tensor, least: Tensor, top_p: Tensor) -> Tensor:
    """Return the least logit of the smallest set of best tokens whose mass reaches top_p.

    found: the best logits of each row, sorted; least: [num_rows, 1] what earlier filters left.
    """
    weights = (logits - most).exp_().masked_fill_(logits < least, 0)
    wanted = weights.sum(dim=-1, keepdim=True).double() * top_p
    mass = (found - most).exp_().masked_fill_(found < least, 0).double()
    before = mass.cumsum(dim=-1) - mass
    inside = (before < wanted) & (found >= least)
    last = found.gather(1, (inside.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)).maximum(least)
    last = torch.where(top_p < 1, last, least)
    # Where even the last candidate is inside, the set may go on beyond the candidates.
    unsure = torch.nonzero(inside[:, -1] & (top_p[:, 0] < 1))[:, 0]
    if found.shape[1] < logits.shape[1] and len(unsure):
        rest = logits[unsure]
        whole = rest.sort(dim=-1, descending=True).values
        last[unsure] = _nucleus(rest, whole, most[unsure], least[unsure], top_p[unsure])
    return last


def _logprobs(raw: Tensor, tokens: Tensor, count: int) -> Logprobs:
    total = raw.logsumexp(dim=-1, keepdim=True)
    best = raw.topk(min(count, raw.shape[1]), dim=-1)
    return Logprobs(
        (raw.gather(1, tokens[:, None]) - total)[:, 0].cpu().numpy(),
        best.indices.to(torch.int32).cpu().numpy(),
        (best.values - total).cpu().numpy(),
    )
