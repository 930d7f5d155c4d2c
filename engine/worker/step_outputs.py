"""From the logits of a step, which come in pieces, to its tokens and the log-probabilities of prompt tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.device.out_of_memory import out_of_memory_told
from engine.device.upload import upload
from engine.errors import StepMemoryError
from engine.report import Ints, PromptScores, SamplingInputs
from engine.sampling.device_outputs import DeviceLogprobs, DeviceOutputs
from engine.sampling.draws import TokenDraws
from engine.sampling.sampler import sample, score

logger = logging.getLogger(__name__)


def outputs_of(
    pieces: Iterable[Tensor],
    sampling: SamplingInputs,
    draws: TokenDraws | None = None,
    before: Tensor | None = None,
) -> DeviceOutputs:
    """Draw the step's tokens and score its prompt tokens.

    pieces: the wanted logits in order, [some, vocab] each. Only rows that are drawn from are kept, so that a
    long prompt whose log-probabilities are wanted never has all its logits in memory. Where there is no memory even
    for a piece's, there are none, and the step goes on: the other ranks must not wait in vain, nor other requests
    lose their tokens. draws, before: see `sample`.
    """
    drawn: list[Tensor] = []
    scored = None if sampling.prompt is None else _Scored(sampling.prompt)
    start = 0
    for piece in pieces:
        if scored is not None:
            scored.read(piece, start)
        drawn.append(piece if sampling.rows is None else _among(piece, start, sampling.rows))
        start += len(piece)
        del piece  # or it would lie beside the next
    if len(sampling.temperature):
        outputs = sample(_joined(drawn), sampling, draws, before)
    else:
        outputs = DeviceOutputs(torch.empty(0, dtype=torch.int32))
    if scored is not None:
        outputs.prompt_logprobs = scored.joined()
    return outputs


class _Scored:
    """The log-probabilities of a step's prompt tokens, as far as the pieces went; none once memory ran out."""

    def __init__(self, prompt: PromptScores) -> None:
        self._prompt = prompt
        self._parts: list[DeviceLogprobs] | None = []

    def read(self, piece: Tensor, start: int) -> None:
        """Score the tokens whose logits lie in the piece which begins at row `start`."""
        if self._parts is None:
            return
        try:
            with out_of_memory_told("the log-probabilities of prompts"):
                self._parts.append(_scores(piece, start, self._prompt))
        except StepMemoryError as error:
            self._parts = None
            logger.error("%s", error)

    def joined(self) -> DeviceLogprobs | None:
        """Return them in the order of the tokens."""
        parts = self._parts
        if parts is None:
            return None
        return DeviceLogprobs(
            torch.cat([part.chosen for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top for part in parts]),
            torch.cat([part.ranks for part in parts if part.ranks is not None]),
        )


def _joined(drawn: list[Tensor]) -> Tensor:
    """Return all rows, of which the list keeps none: they may be copied wider."""
    logits = torch.cat(drawn) if len(drawn) > 1 else drawn[0]
    drawn.clear()
    return logits


def _among(piece: Tensor, start: int, rows: Ints) -> Tensor:
    """Return those of `rows`, ascending rows of all logits, that lie in the piece which begins at `start`."""
    mine = rows[(rows >= start) & (rows < start + len(piece))] - start
    if len(mine) == len(piece):
        return piece
    return piece.index_select(0, upload([mine], piece.device)[0])


def _scores(piece: Tensor, start: int, prompt: PromptScores) -> DeviceLogprobs:
    inside = (prompt.rows >= start) & (prompt.rows < start + len(piece))
    tokens = upload([prompt.token_ids[inside]], piece.device)[0].long()
    return score(_among(piece, start, prompt.rows).float(), tokens, prompt.num_logprobs, ranked=True)
