"""What changes logits before a token is drawn: bias, bans, masks, penalties. Each row by its own rules alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device.gpu import upload
from engine.report import NO_ROWS, Histories, SamplingInputs
from engine.sampling.device_rules import Counted, DeviceRules, TokenLogs, read_histories

NEVER = float("-inf")
LARGEST = torch.finfo(torch.float32).max
TOKENS_AT_A_TIME = 1 << 18  # of histories: some 20 MB on the way

Forbid = Callable[[Tensor, Tensor, Tensor], None]  # logits, rows, bits: as `forbid` does


def ruled_rows(inputs: SamplingInputs) -> NDArray[np.int64] | None:
    """Return the rows whose logits rules may change, ascending; None where masks, which come late, name theirs."""
    if inputs.masks is not None:
        return None
    named = [*inputs.biases, *inputs.allowed, *inputs.forbidden, *inputs.pairs, *inputs.endings[:, 0].tolist()]
    return np.union1d(np.array(named, np.int64), _penalised(inputs))


def of_rows(inputs: SamplingInputs, rows: NDArray[np.int64], rules: DeviceRules) -> SamplingInputs:
    """Return what is asked of some rows, all those of `ruled_rows` among them, without log-probabilities."""
    endings = inputs.endings.copy()
    endings[:, 0] = np.searchsorted(rows, endings[:, 0])
    histories = inputs.histories
    arrays = (
        *("temperature", "top_k", "top_p", "min_p", "seeds", "choices", "positions", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty"),
    )
    return replace(
        inputs,
        **{name: getattr(inputs, name)[rows] for name in arrays},
        biases=rules.moved("biases", inputs.biases, rows),
        allowed=rules.moved("allowed", inputs.allowed, rows),
        forbidden=rules.moved("forbidden", inputs.forbidden, rows),
        pairs=rules.moved("pairs", inputs.pairs, rows),
        endings=endings,
        histories=None if histories is None else Histories(*(each[rows] for each in histories)),
        rows=None,
        prompt=None,
        num_logprobs=-1,
        whole_rows=NO_ROWS,
    )


def apply_rules(logits: Tensor, inputs: SamplingInputs, forbid: Forbid, rules: DeviceRules) -> None:
    """Change `logits`, [num_samples, vocab] fp32, in place: bias, allowed and forbidden ids, masks, penalties.

    Finite logits stay finite or become -inf, whatever the rules: where the model's own must be known from theirs,
    they are looked at before. Nothing here waits for the device; a grammar's masks are waited for while it works.
    forbid: applies them. rules: with logs where `inputs` have histories.
    """
    flat, device = _flat(logits), logits.device

    def places(rows: Tensor, ids: Tensor) -> Tensor:
        return rows * logits.stride(0) + ids

    if inputs.biases:
        *named, added = rules.joined("biases", inputs.biases, device)
        biased = places(*named)
        flat.scatter_(0, biased, flat.index_select(0, biased) + added)
    if inputs.allowed:
        (ruled,) = upload([np.fromiter(inputs.allowed, np.int64)], device)
        allowed = places(*rules.joined("allowed", inputs.allowed, device))
        kept = flat.index_select(0, allowed)
        logits.index_fill_(0, ruled, NEVER)
        flat.scatter_(0, allowed, kept)
    if inputs.masks is not None:
        forbid(logits, *upload(inputs.masks(), device))
    if inputs.forbidden:
        flat.scatter_(0, places(*rules.joined("forbidden", inputs.forbidden, device)), NEVER)
    if (histories := inputs.histories) is None:
        return
    if rules.logs is None:
        raise ValueError("rules ask for the tokens of histories, and there are no logs of them")
    if inputs.pairs or len(inputs.endings):
        words = [upload(list(np.ascontiguousarray(inputs.endings.T.astype(np.int64))), device)]
        if inputs.pairs:
            words.append(rules.joined("pairs", inputs.pairs, device))
        last = rules.logs.last_of_output(histories)
        for rows, before, ids in words:
            completes = last.index_select(0, rows) == before
            # A row may have the same ending after several tokens.
            flat.scatter_add_(
                0, places(rows, ids), torch.zeros_like(ids, dtype=flat.dtype).masked_fill_(completes, NEVER)
            )
    _penalise(logits, inputs, histories, rules.logs)


def _flat(logits: Tensor) -> Tensor:
    """Return all rows, and what may lie between them, as one: one index takes a fraction of the time of two."""
    return logits.as_strided(((len(logits) - 1) * logits.stride(0) + logits.shape[1],), (1,))


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Forbid in each of `rows` what its bits do not allow. bits: [num_masked, vocab / 32 rounded up]."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> places) & 1).bool().flatten(1)[:, : logits.shape[1]]
    index = rows.long()
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~allowed, NEVER))


def _penalised(inputs: SamplingInputs) -> NDArray[np.int64]:
    repetition, presence, frequency = inputs.repetition_penalty, inputs.presence_penalty, inputs.frequency_penalty
    return np.flatnonzero((repetition != 1) | (presence != 0) | (frequency != 0)).astype(np.int64)


def _penalise(logits: Tensor, inputs: SamplingInputs, histories: Histories, logs: TokenLogs) -> None:
    """Apply the penalties to the rows that have any. Repetition counts the prompt, the other two do not."""
    rows = _penalised(inputs)
    # Some rows at a time, so that what is made on the way is no larger for many long ones.
    part = (histories.lens[rows].cumsum(dtype=np.int64) - 1) // TOKENS_AT_A_TIME
    for some in np.split(rows, np.flatnonzero(np.diff(part)) + 1):
        if some.size:
            _penalise_some(logits, inputs, some, read_histories(logs, Histories(*(each[some] for each in histories))))


def _penalise_some(logits: Tensor, inputs: SamplingInputs, rows: NDArray[np.int64], counted: Counted) -> None:
    penalties = (inputs.repetition_penalty, inputs.presence_penalty, inputs.frequency_penalty)
    starts, repetition, presence, frequency = upload(
        [rows * logits.stride(0), *(each[rows] for each in penalties)], logits.device
    )
    flat = _flat(logits)
    seen = starts.index_select(0, counted.rows) + counted.ids
    value, repeated = flat.index_select(0, seen), repetition.index_select(0, counted.rows)
    # A token that is there twice is written twice, and the same.
    flat.scatter_(0, seen, torch.where(value > 0, value / repeated, value * repeated).clamp_(max=LARGEST))
    drawn = starts.index_select(0, counted.output_rows) + counted.output_ids
    flat.scatter_add_(0, drawn, -frequency.index_select(0, counted.output_rows))
    flat.scatter_(0, drawn, flat.index_select(0, drawn) - presence.index_select(0, counted.output_rows))
