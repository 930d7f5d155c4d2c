"""From the logits of a step to its results: draw and score on the device, then bring what was found to the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from engine.device.gpu import as_step_memory_error, upload
from engine.errors import StepMemoryError
from engine.report import Ints, Logprobs, PromptScores, SamplingInputs, StepOutputs
from engine.sampling.device_rules import DeviceRules
from engine.sampling.gumbel import TokenDraws
from engine.sampling.sampler import FAILED, STUCK, DeviceLogprobs, DeviceOutputs, sample, score
from engine.worker.executor import Pending

logger = logging.getLogger(__name__)


class HostSide:
    """Brings what steps leave on one device to the host, without holding up the device or the caller.

    On CUDA the results are copied to pinned memory on a stream of their own, so that the next step, queued behind
    this one, does not come between. On CPU they are where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, outputs: DeviceOutputs) -> Pending:
        """Begin to bring `outputs`, made by what is queued on the current stream."""
        if self._stream is None:
            return _Fetched(outputs, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = _each(outputs, self._to_pinned)
            arrived = torch.cuda.Event()
            arrived.record()
        return _Fetched(copies, arrived)

    def _to_pinned(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor  # a step in the middle of prompts draws nothing, which needs no device
        if self._stream is not None:
            tensor.record_stream(self._stream)  # its memory is not given to others before it is read
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class _Fetched(Pending):
    """Results that are on the host once `arrived` is over."""

    def __init__(self, outputs: DeviceOutputs, arrived: torch.cuda.Event | None) -> None:
        self._outputs = outputs
        self._arrived = arrived

    @property
    @override
    def has_run(self) -> bool:
        return self._arrived is None or self._arrived.query()

    @override
    def result(self) -> StepOutputs:
        if self._arrived is not None:
            self._arrived.synchronize()
        return on_host(self._outputs)


def on_host(outputs: DeviceOutputs) -> StepOutputs:
    """Return results, whose tensors are on the host, as the engine takes them."""
    codes = outputs.token_ids.numpy()
    found = StepOutputs(codes, _logprobs(outputs.logprobs), prompt_logprobs=_logprobs(outputs.prompt_logprobs))
    if codes.min(initial=0) < 0:
        found.token_ids = codes.clip(min=0)
        found.failed = tuple(np.flatnonzero(codes == FAILED).tolist())
        found.stuck = tuple(np.flatnonzero(codes == STUCK).tolist())
    if outputs.pooled is not None:
        found.pooled = outputs.pooled.numpy()
    return found


def _each(outputs: DeviceOutputs, move: Callable[[Tensor], Tensor]) -> DeviceOutputs:
    def moved(found: DeviceLogprobs | None) -> DeviceLogprobs | None:
        if found is None:
            return None
        ranks = None if found.ranks is None else move(found.ranks)
        whole = None if found.whole is None else move(found.whole)
        return DeviceLogprobs(
            move(found.chosen), move(found.top_ids), move(found.top), ranks, found.whole_rows, whole
        )

    pooled = None if outputs.pooled is None else move(outputs.pooled)
    return DeviceOutputs(move(outputs.token_ids), moved(outputs.logprobs), moved(outputs.prompt_logprobs), pooled)


def _logprobs(found: DeviceLogprobs | None) -> Logprobs | None:
    if found is None:
        return None
    ranks = None if found.ranks is None else found.ranks.numpy()
    logprobs = Logprobs(found.chosen.numpy(), found.top_ids.numpy(), found.top.numpy(), ranks)
    if found.whole is not None and found.whole_rows is not None:
        logprobs.whole = dict(zip(found.whole_rows.tolist(), found.whole.numpy(), strict=True))
    return logprobs


def outputs_of(
    pieces: Iterable[Tensor],
    sampling: SamplingInputs,
    draws: TokenDraws | None = None,
    rules: DeviceRules | None = None,
) -> DeviceOutputs:
    """Draw the step's tokens and score its prompt tokens.

    pieces: the wanted logits in order, [some, vocab] each. Only rows that are drawn from are kept, so that a
    long prompt whose log-probabilities are wanted never has all its logits in memory. Where there is no memory even
    for a piece's, there are none, and the step goes on: the other ranks must not wait in vain, nor other requests
    lose their tokens. draws, rules: see `sample`.
    """
    drawn: list[Tensor] = []
    scored = None if sampling.prompt is None else _Scored(sampling.prompt, draws)
    start = 0
    for piece in pieces:
        if scored is not None:
            scored.read(piece, start)
        drawn.append(piece if sampling.rows is None else _among(piece, start, sampling.rows))
        start += len(piece)
        del piece  # or it would lie beside the next
    if len(sampling.temperature):
        outputs = sample(_joined(drawn), sampling, draws, rules)
    else:
        outputs = DeviceOutputs(torch.empty(0, dtype=torch.int32))
    if scored is not None:
        outputs.prompt_logprobs = scored.joined()
    return outputs


class _Scored:
    """The log-probabilities of a step's prompt tokens, as far as the pieces went; none once memory ran out."""

    def __init__(self, prompt: PromptScores, draws: TokenDraws | None) -> None:
        self._prompt = prompt
        self._draws = draws
        self._parts: list[DeviceLogprobs] | None = []

    def read(self, piece: Tensor, start: int) -> None:
        """Score the tokens whose logits lie in the piece which begins at row `start`."""
        if self._parts is None:
            return
        try:
            with as_step_memory_error("the log-probabilities of prompts"):
                self._parts.append(_scores(piece, start, self._prompt, self._draws))
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
    """Return those of `rows`, ascending rows of all logits, that lie in the piece which begins at `start`.

    Siblings that draw from the same logits repeat their row.
    """
    mine = rows[(rows >= start) & (rows < start + len(piece))] - start
    if np.array_equal(mine, np.arange(len(piece))):
        return piece
    return piece.index_select(0, upload([mine], piece.device)[0])


def _scores(piece: Tensor, start: int, prompt: PromptScores, draws: TokenDraws | None) -> DeviceLogprobs:
    inside = (prompt.rows >= start) & (prompt.rows < start + len(piece))
    tokens = upload([prompt.token_ids[inside]], piece.device)[0].long()
    return score(_among(piece, start, prompt.rows), tokens, prompt.num_logprobs, ranked=True, draws=draws)
