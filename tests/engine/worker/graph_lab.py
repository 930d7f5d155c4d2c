"""A device for graphs and copies that a CPU plays, and the fake model run over it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.inputs.block_table import RankTable, aligned
from engine.inputs.step_buffers import StepBuffers
from engine.inputs.token_feedback import TokenFeedback
from engine.report import StepInputs
from engine.worker.graph_pool import CaptureError
from engine.worker.graph_sizes import GraphSizes
from engine.worker.graphs import DecodeGraphs
from parallel.group import SoloGroup
from tests.engine.engine_driver import VOCAB
from tests.fake_executor import FakeExecutor

CPU = torch.device("cpu")


class RerunDevice:
    """Records work by keeping it. failing: sizes' turns (0, 1, ...) at which recording fails."""

    def __init__(self, failing=()) -> None:
        self.failing = set(failing)
        self.asked = self.replays = self.resets = 0
        self.bytes_taken = 0

    def capture(self, work):
        work()
        self.asked += 1
        if self.asked - 1 in self.failing:
            raise CaptureError("the test says so")
        self.bytes_taken += 1000 if not self.bytes_taken else 10
        return work

    def replay(self, graph):
        self.replays += 1
        graph()

    def reset(self):
        self.resets += 1
        self.bytes_taken = 0


class WatchedCopies:
    """Copies at once, and looks that nobody writes to a source whose copy has not been waited for."""

    def __init__(self) -> None:
        self.under_way: list[_Watched] = []
        self.sent: list[int] = []

    def pinned(self, count):
        return torch.full((count,), -7, dtype=torch.int32)

    def send(self, source, target):
        self.check()
        target.copy_(source)
        self.sent.append(len(source))
        self.under_way.append(_Watched(self, source))
        return self.under_way[-1]

    def check(self):
        for copy in self.under_way:
            assert torch.equal(copy.source, copy.was), "a buffer was written to while its copy was under way"


class _Watched:
    def __init__(self, owner, source) -> None:
        self.owner, self.source, self.was = owner, source, source.clone()

    def synchronize(self):
        self.owner.check()
        self.owner.under_way.remove(self)


class BufferedExecutor(FakeExecutor):
    """The fake model, told everything by `StepBuffers` and running its decode steps as graphs with padding."""

    def __init__(self, num_blocks, block_size, sizes, graphs=(1, 2, 4, 8), failing=(), patience=3) -> None:
        super().__init__(num_blocks, block_size, VOCAB)
        self.copies = WatchedCopies()
        self.buffers = StepBuffers(*sizes, CPU, self.copies)
        self.device = RerunDevice(failing)
        # Two fp32 hold the word of 64 bits that the fake model makes of a sequence.
        self.graphs = DecodeGraphs(
            self.device,
            GraphSizes(graphs, graphs[-1:]),
            self.buffers,
            torch.empty(graphs[-1] if graphs else 0, 2),
            self._compute,
        )
        self.graphs.pool._patience = patience
        self._carry = TokenFeedback(SoloGroup(CPU))
        self._rows = 0
        self._words = None
        self.widths: list[tuple[int, int]] = []  # rows and size of each replayed step

    def execute(self, inputs, sampling):
        self._rows = 0
        carried, full = inputs.carried, self._completed(inputs)
        size = self.graphs.choose(inputs)
        if size is None:
            step, copies = self.buffers.load(inputs)
            self._carry.fill(step.input_ids, carried)
            told = told_by(step, inputs, copies)
            self._check(full, told, inputs.num_reqs)
            return self._drew(super().execute(told, sampling))
        assert inputs.logits_indices.tolist() == list(range(inputs.num_reqs)), "a graph gives a row its own logits"
        ids, copies = self.graphs.load(inputs, size)
        self._carry.fill(ids, carried)
        self._copy(copies.numpy())
        self._rows = inputs.num_reqs
        words = self.graphs.run(inputs.num_reqs, size)
        self._words = words.contiguous().numpy().view(np.uint64)[:, 0].copy()
        self._check(full, self._told, inputs.num_reqs)
        self.widths.append((inputs.num_reqs, size))
        try:
            return self._drew(super().execute(replace(full, copy_blocks=inputs.copy_blocks[:0]), sampling))
        finally:
            self._words = None

    def _completed(self, inputs):
        """Return the step with the ids that the host does not know."""
        ids = inputs.input_ids.copy()
        rows, samples = inputs.carried.T
        ids[rows] = self._drawn[samples]
        return replace(inputs, input_ids=ids, carried=inputs.carried[:0])

    def _drew(self, outputs):
        self._carry.keep(torch.from_numpy(outputs.token_ids.copy()))
        return outputs

    def _compute(self, step, logits):
        told = told_by(step)
        beyond = slice(self._rows, None)
        for padding in (told.input_ids, told.positions, told.slot_mapping, told.seq_lens, told.block_tables):
            assert not padding[beyond].any(), "padding is not blank"
        assert told.query_start_loc.tolist() == list(range(len(told.input_ids) + 1))
        self._told = told
        super()._store(told)
        words = super()._attend(told)
        logits.copy_(torch.from_numpy(words.view(np.float32).reshape(-1, 2)))

    def _copy(self, copies):
        if len(copies):
            for held in (self._cache, self.ids):
                held[copies[:, 1]] = held[copies[:, 0]]

    def _store(self, inputs):
        if self._words is None:
            super()._store(inputs)

    def _attend(self, inputs):
        return super()._attend(inputs) if self._words is None else self._words

    def _check(self, inputs, told, rows):
        """Compare what the device was told with what it should have been."""
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens"):
            assert np.array_equal(getattr(told, name)[: len(getattr(inputs, name))], getattr(inputs, name)), name
        width = inputs.block_tables.shape[1]
        assert np.array_equal(told.block_tables[:rows, :width], inputs.block_tables)
        assert np.array_equal(self.buffers.table.numpy()[inputs.slots, :width], inputs.block_tables)
        assert not self.buffers.table[-1].any(), "somebody wrote to the blocks of padding"


def told_by(step, inputs=None, copies=None) -> StepInputs:
    """Return a step as its tensors tell it; those of a decode step tell no more."""
    lens = step.seq_lens.numpy().copy()
    return StepInputs(
        input_ids=step.input_ids.numpy().copy(),
        positions=step.positions.numpy().copy(),
        slot_mapping=step.slot_mapping.numpy().astype(np.int32),
        query_start_loc=step.query_start_loc.numpy().copy(),
        seq_lens=lens,
        num_computed_tokens=np.maximum(lens - 1, 0) if inputs is None else inputs.num_computed_tokens,
        block_tables=step.block_tables.numpy().copy(),
        logits_indices=step.logits_indices.numpy().copy(),
        copy_blocks=np.zeros((0, 2), np.int32) if copies is None else copies.numpy().copy(),
        pooled=np.zeros((0, 2), np.int32) if inputs is None else inputs.pooled,
    )


def sizes_of(config_values: dict, context: int) -> tuple[int, RankTable]:
    """Return what the buffers of an engine with these settings hold: tokens, and a table."""
    columns = -(-context // config_values["block_size"])
    return config_values["max_num_batched_tokens"], RankTable(config_values["max_num_seqs"], aligned(columns))
