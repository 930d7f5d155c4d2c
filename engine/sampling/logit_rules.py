"""What changes logits before a token is drawn: bias, bans, masks, penalties. Each row by its own rules alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.device.gpu import upload
from engine.report import NO_ROWS, Floats, Ints, SamplingInputs

NEVER = float("-inf")
LARGEST = torch.finfo(torch.float32).max

Forbid = Callable[[Tensor, Tensor, Tensor], None]  # logits, rows, bits: as `forbid` does


def ruled_rows(inputs: SamplingInputs) -> NDArray[np.int64] | None:
    """Return the rows whose logits rules may change, ascending; None where masks, which come late, name theirs."""
    if inputs.masks is not None:
        return None
    named = [*inputs.biases, *inputs.allowed, *inputs.forbidden, *inputs.endings[:, 0].tolist()]
    return np.union1d(np.array(named, np.int64), _penalised(inputs))


def of_rows(inputs: SamplingInputs, rows: NDArray[np.int64]) -> SamplingInputs:
    """Return what is asked of some rows, all those of `ruled_rows` among them, without log-probabilities."""
    place = {row: at for at, row in enumerate(rows.tolist())}

    def moved(pairs: Ints) -> Ints:
        return np.concatenate([np.searchsorted(rows, pairs[:, :1]), pairs[:, 1:]], axis=1).astype(np.int32)

    arrays = (
        *("temperature", "top_k", "top_p", "min_p", "seeds", "choices", "positions", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty"),
    )
    return replace(
        inputs,
        **{name: getattr(inputs, name)[rows] for name in arrays},
        prompt_ids=None if inputs.prompt_ids is None else inputs.prompt_ids[rows],
        output_ids=None if inputs.output_ids is None else inputs.output_ids[rows],
        carried=moved(inputs.carried),
        endings=moved(inputs.endings),
        forbidden={place[row]: ids for row, ids in inputs.forbidden.items()},
        allowed={place[row]: ids for row, ids in inputs.allowed.items()},
        biases={place[row]: bias for row, bias in inputs.biases.items()},
        rows=None,
        prompt=None,
        num_logprobs=-1,
        whole_rows=NO_ROWS,
    )


def apply_rules(logits: Tensor, inputs: SamplingInputs, forbid: Forbid, before: Tensor | None = None) -> None:
    """Change `logits`, [num_samples, vocab] fp32, in place: bias, allowed and forbidden ids, masks, penalties.

    Finite logits stay finite or become -inf, whatever the rules: where the model's own must be known from theirs,
    they are looked at before. Nothing here waits for the device; a grammar's masks are waited for while it works.
    forbid: applies them. before: what the step before drew, [its num_samples] int32 on the device of `logits`,
    negative where it has no token; for `inputs.carried` and `inputs.endings`.
    """
    if inputs.biases:
        _bias(logits, inputs.biases)
    if inputs.allowed:
        _allow(logits, inputs.allowed)
    if inputs.masks is not None:
        forbid(logits, *upload(inputs.masks(), logits.device))
    if inputs.forbidden:
        rows, ids = upload(_places(inputs.forbidden), logits.device)
        logits.index_put_((rows, ids), logits.new_full(rows.shape, NEVER))
    if len(inputs.endings):
        _forbid_endings(logits, inputs.endings, _wanted(before))
    _penalise(logits, inputs, before)


def _wanted(before: Tensor | None) -> Tensor:
    if before is None:
        raise ValueError("rules ask for the tokens of the step before, and there are none")
    return before


def _bias(logits: Tensor, biases: Mapping[int, tuple[Ints, Floats]]) -> None:
    places = _places({row: ids for row, (ids, _) in biases.items()})
    rows, ids, added = upload((*places, np.concatenate([some for _, some in biases.values()])), logits.device)
    logits.index_put_((rows, ids), logits[rows, ids] + added)


def _allow(logits: Tensor, allowed: Mapping[int, Ints]) -> None:
    ruled, rows, ids = upload((np.fromiter(allowed, np.int64), *_places(allowed)), logits.device)
    kept = logits[rows, ids]
    logits.index_fill_(0, ruled, NEVER)
    logits.index_put_((rows, ids), kept)


def _places(ids: Mapping[int, Ints | tuple[int, ...]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows and ids one beside the other, of ids by row."""
    counts = [len(some) for some in ids.values()]
    rows = np.repeat(np.fromiter(ids, np.int64, len(counts)), counts)
    return rows, np.concatenate([np.asarray(some, np.int64) for some in ids.values()])


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Forbid in each of `rows` what its bits do not allow. bits: [num_masked, vocab / 32 rounded up]."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> places) & 1).bool().flatten(1)[:, : logits.shape[1]]
    index = rows.long()
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~allowed, NEVER))


def _forbid_endings(logits: Tensor, endings: Ints, before: Tensor) -> None:
    rows, samples, wanted, ids = upload(list(np.ascontiguousarray(endings.T.astype(np.int64))), logits.device)
    completes = before.index_select(0, samples) == wanted
    # A row may have the same ending after several tokens.
    logits.index_put_((rows, ids), logits.new_zeros(len(rows)).masked_fill_(completes, NEVER), accumulate=True)


def _penalised(inputs: SamplingInputs) -> NDArray[np.int64]:
    repetition, presence, frequency = inputs.repetition_penalty, inputs.presence_penalty, inputs.frequency_penalty
    return np.flatnonzero((repetition != 1) | (presence != 0) | (frequency != 0)).astype(np.int64)


def _penalise(logits: Tensor, inputs: SamplingInputs, before: Tensor | None) -> None:
    """Apply the penalties to the rows that have any. Repetition counts the prompt, the other two do not."""
    rows = _penalised(inputs)
    if not rows.size or inputs.prompt_ids is None:
        return
    repetition, presence, frequency = inputs.repetition_penalty, inputs.presence_penalty, inputs.frequency_penalty
    vocab = logits.shape[1]
    empty = np.empty((len(rows), 0), np.int32)
    index, prompt, output, *values = upload(
        (
            rows,
            _history(inputs.prompt_ids[rows], vocab),
            _history(empty if inputs.output_ids is None else inputs.output_ids[rows], vocab),
            *(each[rows] for each in (repetition, presence, frequency)),
        ),
        logits.device,
    )
    repeated, present, frequent = (each[:, None] for each in values)
    if len(inputs.carried):
        output = torch.cat((output, _last_tokens(rows, inputs.carried, _wanted(before), vocab)), dim=1)
    # One column more takes what is written for padding.
    work = F.pad(logits.index_select(0, index), (0, 1))
    seen = torch.cat((prompt, output), dim=1)
    value = work.gather(1, seen)
    work.scatter_(1, seen, torch.where(value > 0, value / repeated, value * repeated).clamp_(max=LARGEST))
    work.scatter_add_(1, output, -frequent.expand(output.shape))
    work.scatter_(1, output, work.gather(1, output) - present)
    logits.index_copy_(0, index, work[:, :vocab])


def _last_tokens(rows: NDArray[np.int64], carried: Ints, before: Tensor, padding: int) -> Tensor:
    """Return the last output token of each of `rows`, [num_rows, 1], where only the device knows it."""
    samples = np.full(len(rows), -1, np.int64)
    samples[np.searchsorted(rows, carried[:, 0])] = carried[:, 1]
    (index,) = upload([samples], before.device)
    drawn = before.index_select(0, index.clamp(min=0)).long()
    return drawn.masked_fill((index < 0) | (drawn < 0), padding)[:, None]


def _history(ids: Ints, vocab: int) -> NDArray[np.int64]:
    return np.where(ids < 0, vocab, ids).astype(np.int64)
