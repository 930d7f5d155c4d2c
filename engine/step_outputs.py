"""From the logits of a step, which come in pieces, to its tokens and the log-probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.device_outputs import DeviceLogprobs, DeviceOutputs
from engine.draws import TokenDraws
from engine.report import Ints, PromptScores, SamplingInputs
from engine.sampler import sample, score
from engine.upload import upload


def outputs_of(pieces: Iterable[Tensor], sampling: SamplingInputs, draws: TokenDraws | None = None) -> DeviceOutputs:
    """Draw the step's tokens and score its prompt tokens.

    pieces: the wanted logits in order, [some, vocab] fp32 each. Only rows that are drawn from are kept, so that a
    long prompt whose log-probabilities are wanted never has all its logits in memory. draws: see `sample`.
    """
    drawn: list[Tensor] = []
    scored: list[DeviceLogprobs] = []
    start = 0
    for piece in pieces:
        if sampling.prompt is not None:
            scored.append(_scores(piece, start, sampling.prompt))
        drawn.append(piece if sampling.rows is None else _among(piece, start, sampling.rows))
        start += len(piece)
    if len(sampling.temperature):
        outputs = sample(torch.cat(drawn) if len(drawn) > 1 else drawn[0], sampling, draws)
    else:
        outputs = DeviceOutputs(torch.empty(0, dtype=torch.int32))
    if sampling.prompt is not None:
        outputs.prompt_logprobs = _joined(scored)
    return outputs


def _among(piece: Tensor, start: int, rows: Ints) -> Tensor:
    """Return those of `rows`, ascending rows of all logits, that lie in the piece which begins at `start`."""
    mine = rows[(rows >= start) & (rows < start + len(piece))] - start
    return piece.index_select(0, upload([mine], piece.device)[0])


def _scores(piece: Tensor, start: int, prompt: PromptScores) -> DeviceLogprobs:
    inside = (prompt.rows >= start) & (prompt.rows < start + len(piece))
    tokens = upload([prompt.token_ids[inside]], piece.device)[0].long()
    return score(_among(piece, start, prompt.rows), tokens, prompt.num_logprobs)


def _joined(parts: Sequence[DeviceLogprobs]) -> DeviceLogprobs:
    return DeviceLogprobs(
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top for part in parts]),
    )
