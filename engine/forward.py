"""The forward pass of a step on one rank: from its inputs to the logits that are wanted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionContext, StepTensors
from engine.carry import Carry
from engine.decode_graphs import DecodeGraphs, RestOfHead
from engine.graph_pool import GraphDevice
from engine.graph_sizes import GraphSizes
from engine.kv_cache import KVCache, opened_blocks
from engine.models.decoder import Decoder
from engine.report import StepInputs
from engine.sharded_draw import Head
from engine.step_buffers import StepBuffers
from engine.step_tensors import split_step, to_device
from engine.upload import upload

# Tokens that a CPU takes through the layers at a time: their activations stay in its cache and in memory at hand.
PART_TOKENS = 1024
LOGIT_ROWS = 1024  # rows of logits that are in memory at a time


@dataclass(frozen=True, slots=True)
class Passed:
    """What a forward pass gives; the next one may overwrite it.

    rows: of what `head` makes wanted logits, in order. pooled: sums of hidden states, [num_pooled, hidden] fp32.
    """

    rows: Tensor
    head: Head
    pooled: Tensor


class Forward:
    """Runs a model over its part of the KV cache. All ranks of a group must make the same calls."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        cache: KVCache,
        carry: Carry,
        buffers: StepBuffers | None = None,
    ) -> None:
        """buffers: where a device gets its inputs; None on CPU, where they are not sent anywhere."""
        self.graphs: DecodeGraphs | None = None
        self._model = model
        self._rest = RestOfHead(model)
        self._attention = attention
        self._cache = cache
        self._carry = carry
        self._buffers = buffers
        self._device = model.group.device

    def use_graphs(self, device: GraphDevice, sizes: GraphSizes, longest: int) -> None:
        """Replay decode steps from now on, where the attention backend `supports_graphs` and there are buffers.

        longest: tokens of a sequence.
        """
        if self._buffers is None or not self._attention.supports_graphs:
            return

        def compute(step: StepTensors, logits: Tensor) -> None:
            states = self._states(step, self._attention.decode_metadata(step, longest))
            self._model.own_logits(states, out=logits)

        self.graphs = DecodeGraphs(device, sizes, self._buffers, self._model.head.share, compute)

    def use_cache(self, cache: KVCache) -> None:
        """Run over another cache from now on."""
        self.drop_graphs()
        self._cache = cache

    @torch.inference_mode()
    def estimate_graphs(self) -> int:
        """Return about how many bytes of the device the graphs of all sizes take; there are none afterwards."""
        return 0 if self.graphs is None else self.graphs.pool.estimate()

    def drop_graphs(self) -> None:
        """Forget what was captured; call before weights or cache move."""
        if self.graphs is not None:
            self.graphs.pool.clear()

    def run(self, inputs: StepInputs) -> Passed:
        """Run one step."""
        if self.graphs is not None and (size := self.graphs.choose(inputs)) is not None:
            self._before(inputs, *self.graphs.load(inputs, size))
            logits = self.graphs.run(inputs.num_reqs, size)
            return Passed(logits, self._rest, logits[:0])
        parts = split_step(inputs, PART_TOKENS) if self._buffers is None else [inputs]
        found = [self._layers(part) for part in parts]
        hidden = torch.cat([rows for rows, _ in found]) if len(found) > 1 else found[0][0]
        return Passed(hidden, self._model, torch.stack([pooled for _, pooled in found]).sum(dim=0))

    def _layers(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Run the layers; returns the rows whose logits are wanted, and the sums of what is pooled.

        [num_logits, hidden], and [num_pooled, hidden] fp32.
        """
        step, copies = self._load(inputs)
        self._before(inputs, step.input_ids, copies)
        states = self._states(step, self._attention.prepare(step))
        pooled = [self._model.final(states[first:beyond]).sum(dim=0) for first, beyond in inputs.pooled.tolist()]
        return states.index_select(0, step.logits_indices), torch.stack(pooled) if pooled else states[:0].float()

    def _load(self, inputs: StepInputs) -> tuple[StepTensors, Tensor]:
        return to_device(inputs, self._device) if self._buffers is None else self._buffers.load(inputs)

    def _before(self, inputs: StepInputs, input_ids: Tensor, copies: Tensor) -> None:
        """Complete the ids, and do what must be done to the cache before the step writes to it."""
        self._carry.fill(input_ids, inputs.carried)
        self._cache.copy(copies)
        if self._attention.reads_unwritten:
            opened = opened_blocks(inputs.slot_mapping, self._cache.block_size)
            if opened.size:
                self._cache.clear(upload([opened], self._device)[0])

    def _states(self, step: StepTensors, metadata: object) -> Tensor:
        context = AttentionContext(self._attention, metadata, self._cache.layers)
        return self._model(step.input_ids, step.positions, context)
