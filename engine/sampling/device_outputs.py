"""What a step leaves on the device, and how it gets to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from engine.report import Logprobs, StepOutputs
from engine.worker.executor import Pending

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


@dataclass(slots=True)
class DeviceOutputs:
    """`StepOutputs` on the device. Nobody writes to these tensors any more."""

    token_ids: Tensor  # [num_samples] int32; FAILED or STUCK where there is no token
    logprobs: DeviceLogprobs | None = None
    prompt_logprobs: DeviceLogprobs | None = None
    pooled: Tensor | None = None  # [num_pooled, hidden] fp32


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
        return DeviceLogprobs(move(found.chosen), move(found.top_ids), move(found.top), ranks)

    pooled = None if outputs.pooled is None else move(outputs.pooled)
    return DeviceOutputs(move(outputs.token_ids), moved(outputs.logprobs), moved(outputs.prompt_logprobs), pooled)


def _logprobs(found: DeviceLogprobs | None) -> Logprobs | None:
    if found is None:
        return None
    ranks = None if found.ranks is None else found.ranks.numpy()
    return Logprobs(found.chosen.numpy(), found.top_ids.numpy(), found.top.numpy(), ranks)
