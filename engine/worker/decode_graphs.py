"""Decode steps as CUDA graphs: their inputs filled in with padding, the graph replayed, the logits read."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.attention.base import StepTensors
from engine.inputs.step_buffers import StepBuffers
from engine.models.decoder import Decoder
from engine.report import StepInputs
from engine.worker.graph_pool import GraphDevice, GraphPool
from engine.worker.graph_sizes import GraphSizes, decode_rows


class RestOfHead:
    """What is left to do of a decoder's output head where the logits of this rank's share are there already."""

    def __init__(self, model: Decoder) -> None:
        self.spec = model.spec
        self.group = model.group
        self._head = model.head

    def logits(self, own: Tensor) -> Tensor:
        """Return the logits on every rank: [num_samples, share] -> [num_samples, vocab]."""
        return self._head.join(own)

    def own_logits(self, own: Tensor) -> Tensor:
        """Return them as they are."""
        return own


class DecodeStep:
    """A decode step of a padded size, from the buffers of its inputs to that of its logits: what a graph holds."""

    def __init__(self, buffers: StepBuffers, logits: Tensor, compute: Callable[[StepTensors, Tensor], None]) -> None:
        self.logits = logits
        self._buffers = buffers
        self._compute = compute

    def blank(self, size: int) -> None:
        """Fill in a step of nothing but padding."""
        self._buffers.blank(size)

    def run(self, size: int) -> None:
        """Compute the step that is filled in."""
        self._compute(self._buffers.decode_tensors(size), self.logits[:size])


class DecodeGraphs:
    """The graphs of a model's decode steps, between the buffers of their inputs and that of their logits.

    What they hold leads to neither this object nor its owner: all memory is free with the last reference to them.
    """

    def __init__(
        self,
        device: GraphDevice,
        sizes: GraphSizes,
        buffers: StepBuffers,
        logits: Tensor,
        compute: Callable[[StepTensors, Tensor], None],
    ) -> None:
        """compute: puts the logits of a decode step, whose tensors are filled in anew each time, into a tensor.

        That is [sequences, share], a part of `logits`, which has room for the largest size: this rank's share of the
        vocabulary. Padding has no length; it writes to the null block alone.
        """
        self.step = DecodeStep(buffers, logits, compute)
        self.pool = GraphPool(device, sizes, self.step.blank, self.step.run)
        self._buffers = buffers

    def choose(self, inputs: StepInputs) -> int | None:
        """Return the padded size that a step takes, None where it is run as it is. Call before `load`."""
        rows = decode_rows(inputs)
        return None if rows is None else self.pool.choose(rows)

    def load(self, inputs: StepInputs, size: int) -> tuple[Tensor, Tensor]:
        """Fill in the step; return its ids, [num_tokens], which may be changed before `run`, and its block copies.

        The latter, [num_copies, 2], are to be made before `run`.
        """
        return self._buffers.load_decode(inputs, size)

    def run(self, rows: int, size: int) -> Tensor:
        """Return the logits of the step that is filled in, [rows, share]; the next step overwrites them."""
        self.pool.run(size)
        return self.step.logits[:rows]
