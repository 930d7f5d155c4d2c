"""The forward pass of a step on one rank: from its inputs to the logits that are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionContext, StepTensors
from engine.config import EngineConfig
from engine.device.gpu import upload
from engine.inputs.block_table import rows_of
from engine.inputs.step_buffers import StepBuffers, to_device
from engine.inputs.token_feedback import TokenFeedback
from engine.kernels.recurrent import StateRows
from engine.kv.cache import KVCache, opened_blocks
from engine.models.causal_lm import CausalLM
from engine.report import StepInputs
from engine.sampling.device_rules import TokenLogs
from engine.sampling.sharded_draw import OutputHead
from engine.worker.graph_pool import GraphDevice, GraphPool
from engine.worker.graph_sizes import NO_SIZES, GraphSizes
from engine.worker.graphs import DecodeGraphs, MixedGraphs, MixedResults, RestOfHead

# Tokens that a CPU takes through the layers at a time: their activations stay in its cache and in memory at hand.
PART_TOKENS = 1024
LOGIT_ROWS = 1024  # rows of logits that are in memory at a time, at most
SCORED_BYTES = 64 << 20  # of logits in fp32 that the log-probabilities of a prompt are read from at a time


def logit_rows(config: EngineConfig, vocab_size: int) -> int:
    """Return how many rows of logits are in memory at a time, on every rank alike: all that draw in a step, if they
    are no more than `LOGIT_ROWS`, and no more than those or `SCORED_BYTES` of a prompt whose tokens are scored.
    """
    return min(LOGIT_ROWS, max(config.max_num_seqs, SCORED_BYTES // (4 * vocab_size), 1))


@dataclass(frozen=True, slots=True)
class Passed:
    """What a forward pass gives; the next one may overwrite it.

    rows: of what `head` makes wanted logits, in order. pooled: sums of hidden states, [num_pooled, hidden] fp32.
    logs: the tokens of all rows of the step.
    """

    rows: Tensor
    head: OutputHead
    pooled: Tensor
    logs: TokenLogs


class CachedModel:
    """A model over its part of the KV cache. It knows none of its users, so graphs may hold it as `Forward` does."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, cache: KVCache) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache

    def states(self, step: StepTensors, metadata: object, rows: StateRows | None = None) -> Tensor:
        """Return the hidden states of a step, [num_tokens, hidden]. metadata: of the attention backend."""
        self.cache.token_ids.view(-1).index_copy_(0, step.slot_mapping, step.input_ids)
        context = AttentionContext(self.attention, metadata, self.cache.layers, rows)
        return self.model(step.input_ids, step.positions, context)

    def decode(self, longest: int, step: StepTensors, logits: Tensor) -> None:
        """Put the logits of a decode step into `logits`, [sequences, share]. longest: tokens of a sequence."""
        states = self.states(step, self.attention.decode_metadata(step, longest))
        self.model.own_logits(states, out=logits)

    def mixed(self, longest: int, step: StepTensors, plan: Tensor, results: MixedResults) -> None:
        """Put the hidden states and the wanted logits of a mixed step into `results`; see `MixedGraphs`."""
        states = self.states(step, self.attention.mixed_metadata(step, plan, longest))
        results.states.copy_(states)
        self.model.own_logits(states.index_select(0, step.logits_indices), out=results.logits)


class Forward:
    """Runs a model over its part of the KV cache. All ranks of a group must make the same calls."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        cache: KVCache,
        carry: TokenFeedback,
        buffers: StepBuffers | None = None,
    ) -> None:
        """buffers: where a device gets its inputs; None on CPU, where they are not sent anywhere."""
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self._over = CachedModel(model, attention, cache)
        self._rest = RestOfHead(model)
        self._carry = carry
        self._buffers = buffers
        self._device = model.group.device

    def use_graphs(
        self, device: GraphDevice, sizes: GraphSizes, longest: int, mixed: GraphSizes = NO_SIZES, rows: int = 0
    ) -> None:
        """Replay decode steps from now on, where the attention backend `supports_graphs` and there are buffers.

        Small mixed steps, too, where it `supports_mixed_graphs`. longest: tokens of a sequence. mixed: tokens that
        those steps are padded to. rows: most of any step.
        """
        attention, buffers, model = self._over.attention, self._buffers, self._over.model
        if buffers is None or not attention.supports_graphs:
            return
        if not attention.supports_mixed_graphs:
            mixed = NO_SIZES
        shape = (max(sizes.largest, min(rows, mixed.largest)), model.head.share)
        logits = torch.empty(shape, dtype=model.logits_dtype, device=buffers.device)
        self.graphs = DecodeGraphs(device, sizes, buffers, logits, partial(self._over.decode, longest))
        if mixed.largest:
            compute = partial(self._over.mixed, longest)
            wide = (mixed.largest, model.hidden_size)
            states = torch.empty(wide, dtype=attention.spec.dtype, device=buffers.device)
            results = MixedResults(states, logits[:rows])
            self.mixed = MixedGraphs(device, mixed, buffers, attention, results, compute)

    @property
    def pools(self) -> tuple[GraphPool, ...]:
        """The graphs, kind by kind."""
        return tuple(graphs.pool for graphs in (self.graphs, self.mixed) if graphs is not None)

    def use_cache(self, cache: KVCache) -> None:
        """Run over another cache from now on."""
        self.drop_graphs()
        self._over.cache = cache

    @torch.inference_mode()
    def estimate_graphs(self) -> int:
        """Return about how many bytes of the device the graphs of all sizes take; there are none afterwards."""
        return sum(pool.estimate() for pool in self.pools)

    def drop_graphs(self) -> None:
        """Forget what was captured; call before weights or cache move."""
        for pool in self.pools:
            pool.clear()

    def run(self, inputs: StepInputs) -> Passed:
        """Run one step."""
        if self.graphs is not None and (size := self.graphs.choose(inputs)) is not None:
            self._before(inputs, *self.graphs.load(inputs, size))
            logits = self.graphs.run(inputs.num_reqs, size)
            return Passed(logits, self._rest, logits[:0], self._logs(inputs))
        if self.mixed is not None and (fit := self.mixed.choose(inputs)) is not None:
            self._before(inputs, *self.mixed.load(inputs, fit))
            states, logits = self.mixed.run(inputs, fit)
            return Passed(logits, self._rest, self._pooled(states, inputs), self._logs(inputs))
        parts = split_step(inputs, PART_TOKENS) if self._buffers is None else [inputs]
        found = [self._layers(part) for part in parts]
        hidden = torch.cat([rows for rows, _ in found]) if len(found) > 1 else found[0][0]
        pooled = torch.stack([pooled for _, pooled in found]).sum(dim=0)
        return Passed(hidden, self._over.model, pooled, self._logs(inputs))

    def _logs(self, inputs: StepInputs) -> TokenLogs:
        ids = self._over.cache.token_ids
        if self._buffers is None:
            return TokenLogs(ids, torch.from_numpy(inputs.block_tables), np.arange(inputs.num_reqs, dtype=np.int32))
        return TokenLogs(ids, self._buffers.table, rows_of(inputs.slots, inputs.num_reqs))

    def _layers(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Run the layers; returns the rows whose logits are wanted, and the sums of what is pooled.

        [num_logits, hidden], and [num_pooled, hidden] fp32.
        """
        step, copies = self._load(inputs)
        self._before(inputs, step.input_ids, copies)
        states = self._over.states(step, self._over.attention.prepare(step), self._state_rows(inputs, step))
        if len(inputs.state_copies):
            self._over.cache.copy_states(upload([inputs.state_copies.copy()], self._device)[0])
        return states.index_select(0, step.logits_indices), self._pooled(states, inputs)

    def _state_rows(self, inputs: StepInputs, step: StepTensors) -> StateRows | None:
        """Return where the recurrent states of a step are: of one without sequences, in the last slot."""
        cache = self._over.cache
        if not cache.states:
            return None
        if len(inputs.state_sources):
            sources, targets = upload([inputs.state_sources.copy(), inputs.slots.copy()], self._device)
        else:
            sources = torch.full((inputs.num_reqs,), -1, dtype=torch.int32, device=self._device)
            targets = torch.full_like(sources, cache.num_states - 1)
        return StateRows(step.query_start_loc, sources, targets)

    def _pooled(self, states: Tensor, inputs: StepInputs) -> Tensor:
        sums = [self._over.model.final(states[first:beyond]).sum(dim=0) for first, beyond in inputs.pooled.tolist()]
        return torch.stack(sums) if sums else states[:0].float()

    def _load(self, inputs: StepInputs) -> tuple[StepTensors, Tensor]:
        return to_device(inputs, self._device) if self._buffers is None else self._buffers.load(inputs)

    def _before(self, inputs: StepInputs, input_ids: Tensor, copies: Tensor) -> None:
        """Complete the ids, and do what must be done to the cache before the step writes to it."""
        self._carry.fill(input_ids, inputs.carried)
        cache = self._over.cache
        cache.copy(copies)
        if self._over.attention.reads_unwritten:
            opened = opened_blocks(inputs.slot_mapping, cache.block_size)
            if opened.size:
                cache.clear(upload([opened], self._device)[0])


def split_step(inputs: StepInputs, most: int) -> list[StepInputs]:
    """Cut a step into parts of about one size and at most `most` tokens, to be run one after another.

    A sequence that is cut continues in the next part as a chunked prompt does. Block copies stay with the first part,
    those of recurrent states with the last.
    Every part has a share of all that is pooled, most of them an empty one.
    """
    count = -(-inputs.num_tokens // most)
    if count <= 1:
        return [inputs]
    bounds = np.linspace(0, inputs.num_tokens, count + 1).astype(np.int32).tolist()
    return [_part(inputs, start, end) for start, end in pairwise(bounds)]


def _part(inputs: StepInputs, start: int, end: int) -> StepInputs:
    """Return the step of the tokens [start, end) alone."""
    first = inputs.query_start_loc[:-1].clip(start, end)
    last = inputs.query_start_loc[1:].clip(start, end)
    rows = np.flatnonzero(last > first)
    first, last = first[rows], last[rows]
    computed = inputs.num_computed_tokens[rows] + first - inputs.query_start_loc[rows]
    wanted, carried = inputs.logits_indices, inputs.carried
    mine = carried[(carried[:, 0] >= start) & (carried[:, 0] < end)]
    begun = first > inputs.query_start_loc[rows]  # a row's state is where the part before has left it
    return StepInputs(
        input_ids=inputs.input_ids[start:end],
        positions=inputs.positions[start:end],
        slot_mapping=inputs.slot_mapping[start:end],
        query_start_loc=np.append(first, end).astype(np.int32) - np.int32(start),
        seq_lens=computed + last - first,
        num_computed_tokens=computed,
        block_tables=inputs.block_tables[rows],
        logits_indices=wanted[(wanted >= start) & (wanted < end)] - np.int32(start),
        copy_blocks=inputs.copy_blocks if start == 0 else inputs.copy_blocks[:0],
        pooled=inputs.pooled.clip(start, end) - np.int32(start),
        carried=mine - np.array([start, 0], np.int32),
        slots=inputs.slots[rows] if len(inputs.slots) else inputs.slots,
        state_sources=np.where(begun, inputs.slots[rows], inputs.state_sources[rows])
        if len(inputs.state_sources)
        else inputs.state_sources,
        state_copies=inputs.state_copies if end == inputs.num_tokens else inputs.state_copies[:0],
    )
