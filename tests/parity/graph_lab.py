"""A CUDA graph that a CPU plays: operations of torch are noted once and repeated on the same memory."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.attention.base import StepTensors
from engine.attention.reference import ReferenceAttention
from engine.inputs.step_buffers import NOT_MIXED, MixedShape, StepBuffers
from engine.worker.forward import Forward
from engine.worker.graph_sizes import NO_SIZES, GraphSizes
from engine.worker.runner import ModelRunner
from tests.engine.worker.graph_lab import CPU, WatchedCopies


class Recording(TorchDispatchMode):
    """While entered, notes every operation. No Python runs again in `repeat`, so what the host knew is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, result))
        return result

    def repeat(self):
        for func, args, kwargs, result in self.steps:
            old = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            new = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for kept, made in zip(old, new, strict=True):
                if kept.untyped_storage().data_ptr() != made.untyped_storage().data_ptr():
                    kept.copy_(made)


class RecordingDevice:
    """Records on the CPU; see `engine.worker.graph_pool.GraphDevice`."""

    def __init__(self) -> None:
        self.bytes_taken = 0
        self.replays = 0

    def capture(self, work):
        work()
        with Recording() as graph:
            work()
        return graph

    def replay(self, graph):
        self.replays += 1
        graph.repeat()

    def reset(self):
        """Nothing is shared."""


class GraphAttention(ReferenceAttention):
    """The reference, with decode and mixed steps in plain operations on tensors: nothing is planned on the host."""

    supports_graphs = True
    supports_mixed_graphs = True

    def decode_metadata(self, step, max_seq_len):
        return step

    def mixed_plan_size(self, tokens, rows):
        return 1

    def mixed_plan(self, layout, tokens, rows):
        return np.zeros(1, np.int32)

    def mixed_metadata(self, step, plan, max_seq_len):
        return step

    def forward(self, query, key, value, cache, metadata, window, sinks=None):
        if not isinstance(metadata, StepTensors):
            return super().forward(query, key, value, cache, metadata, window, sinks)
        for store, new in ((cache.keys, key), (cache.values, value)):
            store.flatten(0, 1).index_copy_(0, metadata.slot_mapping, new)
        spec, starts = self.spec, metadata.query_start_loc
        token = torch.arange(len(query), dtype=torch.int32)
        # A token of no row takes the last one, which has no keys where there are such tokens.
        row = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=len(starts) - 2)
        lens = metadata.seq_lens[row]
        position = (lens - (starts[1:] - starts[:-1])[row] + token - starts[row])[:, None]
        # [tokens, keys, kv heads, head_dim], a head for each query head
        keys, values = (
            store[metadata.block_tables[row]].flatten(1, 2).repeat_interleave(self.group, dim=2)
            for store in (cache.keys, cache.values)
        )
        places = torch.arange(keys.shape[1])[None]
        seen = (places < lens[:, None]) & (places <= position)
        if window:
            seen = seen & (places > position - window)
        scores = torch.einsum("rhd,rkhd->rhk", query.float(), keys.float()) * spec.scale
        if spec.softcap:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), -1).nan_to_num(0.0)
        return torch.einsum("rhk,rkhd->rhd", weights, values.float()).to(query.dtype)


def use_graphs(runner: ModelRunner, sizes: GraphSizes, device=None, attention=None, mixed=NO_SIZES):
    """Let a runner on the CPU take the way of a GPU: inputs through `StepBuffers`, decode steps as graphs.

    attention: a backend other than `GraphAttention`. mixed: tokens of the graphs of mixed steps.
    """
    config, device = runner.config, device or RecordingDevice()
    runner._attention = attention = attention or GraphAttention(runner._attention.spec)
    most = min(config.max_num_seqs, mixed.largest)
    largest = MixedShape(mixed.largest, most, attention.mixed_plan_size(mixed.largest, most)) if most else NOT_MIXED
    buffers = StepBuffers(config.token_budget, runner.block_table, CPU, WatchedCopies(), largest)
    runner._forward = Forward(runner.model, attention, runner._cache, runner._carry, buffers)
    runner._forward.use_graphs(device, sizes, config.context_len, mixed, config.max_num_seqs)
    return device
