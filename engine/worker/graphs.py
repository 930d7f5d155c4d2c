"""Steps that are replayed from CUDA graphs: inputs filled in with padding, the graph replayed, the results read.

Decode steps are padded to a number of sequences. Small steps with prompts are padded to a number of tokens, whatever
the rows that these belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from engine.attention.base import AttentionBackend, Ints, StepTensors
from engine.inputs.step_buffers import MixedShape, StepBuffers
from engine.models.causal_lm import CausalLM
from engine.report import StepInputs
from engine.worker.graph_pool import GraphDevice, GraphPool
from engine.worker.graph_sizes import GraphSizes, decode_rows


class RestOfHead:
    """What is left to do of a model's output head where the logits of this rank's share are there already."""

    def __init__(self, model: CausalLM) -> None:
        self.vocab_size = model.vocab_size
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


class MixedResults(NamedTuple):
    """What a mixed step gives; the next one overwrites it.

    states: hidden states before the final norm, [tokens, hidden]. logits: those that are wanted, of this rank's share
    of the vocabulary, [rows, share].
    """

    states: Tensor
    logits: Tensor

    def of(self, tokens: int, rows: int) -> MixedResults:
        """Return the first of them."""
        return MixedResults(self.states[:tokens], self.logits[:rows])


# Puts the results of a mixed step, whose tensors are filled in anew each time, where they belong; between them is the
# attention backend's plan, on the device.
Compute = Callable[[StepTensors, Tensor, MixedResults], None]


class MixedPlan(NamedTuple):
    """The padded tokens that a step takes, and the attention backend's plan of it."""

    tokens: int
    plan: Ints


class MixedStep:
    """A mixed step of a padded size, from the buffers of its inputs to those of its results: what a graph holds."""

    def __init__(
        self, buffers: StepBuffers, shape_of: Callable[[int], MixedShape], results: MixedResults, compute: Compute
    ) -> None:
        self.results = results
        self.shape_of = shape_of
        self._buffers = buffers
        self._compute = compute

    def blank(self, tokens: int) -> None:
        """Fill in a step of nothing but padding."""
        self._buffers.blank_mixed(self.shape_of(tokens))

    def run(self, tokens: int) -> None:
        """Compute the step that is filled in."""
        shape = self.shape_of(tokens)
        step, plan = self._buffers.mixed_tensors(shape)
        self._compute(step, plan, self.results.of(shape.tokens, shape.rows))


class MixedGraphs:
    """The graphs of a model's mixed steps, between the buffers of their inputs and those of their results.

    What they hold leads to neither this object nor its owner: all memory is free with the last reference to them.
    """

    def __init__(
        self,
        device: GraphDevice,
        sizes: GraphSizes,
        buffers: StepBuffers,
        attention: AttentionBackend,
        results: MixedResults,
        compute: Compute,
    ) -> None:
        """results: for the most tokens of `sizes`, and the most rows that any step has."""
        most, plan_size = len(results.logits), attention.mixed_plan_size

        def shape_of(tokens: int) -> MixedShape:
            rows = min(tokens, most)
            return MixedShape(tokens, rows, plan_size(tokens, rows))

        self.step = MixedStep(buffers, shape_of, results, compute)
        self.pool = GraphPool(device, sizes, self.step.blank, self.step.run, what="mixed steps of %d tokens")
        self._buffers = buffers
        self._attention = attention

    def choose(self, inputs: StepInputs) -> MixedPlan | None:
        """Return how a step is padded, None where it is run as it is. Call before `load`."""
        tokens = self.pool.sizes.fit(inputs.num_tokens)
        if tokens is None:
            return None
        shape = self.step.shape_of(tokens)
        if max(inputs.num_reqs, len(inputs.logits_indices)) > shape.rows:
            return None
        plan = self._plan(inputs, tokens)
        if plan is None:
            return None
        chosen = self.pool.choose(tokens)
        if chosen != tokens:  # it is not captured yet, and another is
            plan = None if chosen is None else self._plan(inputs, chosen)
        return None if chosen is None or plan is None else MixedPlan(chosen, plan)

    def _plan(self, inputs: StepInputs, tokens: int) -> Ints | None:
        return self._attention.mixed_plan(inputs, tokens, self.step.shape_of(tokens).rows)

    def load(self, inputs: StepInputs, fit: MixedPlan) -> tuple[Tensor, Tensor]:
        """Fill in the step; return its ids, [num_tokens], which may be changed before `run`, and its block copies.

        The latter, [num_copies, 2], are to be made before `run`.
        """
        return self._buffers.load_mixed(inputs, self.step.shape_of(fit.tokens), fit.plan)

    def run(self, inputs: StepInputs, fit: MixedPlan) -> MixedResults:
        """Return the results of the step that is filled in, without those of padding."""
        self.pool.run(fit.tokens)
        return self.step.results.of(inputs.num_tokens, len(inputs.logits_indices))
