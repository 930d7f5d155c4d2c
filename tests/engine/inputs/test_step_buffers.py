"""What a step's tensors say is what the step is, whatever came before; the histories are those of a whole engine."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from engine.device.gpu import HostPair
from engine.inputs.block_table import ALIGNMENT, RankTable
from engine.inputs.step_buffers import MixedShape, StepBuffers
from engine.report import StepInputs
from tests.engine.engine_driver import Driver, request
from tests.engine.scheduler.test_engine_state_machine import CONTEXT, EngineMachine, PromptDriver, shapes
from tests.engine.worker.graph_lab import CPU, BufferedExecutor, WatchedCopies, sizes_of


class BufferedMachine(EngineMachine):
    """Random histories, run over the device's tables and padded decode steps: the tokens stay the same."""

    @initialize(
        shape=shapes,
        tokens=st.integers(10, 44),
        graphs=st.sampled_from([(1, 2, 4, 8), (2, 3), (1,), (6,)]),
        failing=st.sets(st.integers(0, 3), max_size=2),
        patience=st.integers(1, 4),
    )
    def start(self, shape, tokens, graphs, failing, patience):
        shape = {**shape, **self.settings}
        blocks = 1 + tokens // shape["block_size"]
        graphs = tuple(size for size in graphs if size <= shape["max_num_seqs"]) or (shape["max_num_seqs"],)
        buffered = BufferedExecutor(blocks, shape["block_size"], sizes_of(shape, CONTEXT), graphs, failing, patience)
        self.driver = PromptDriver(num_blocks=blocks, executor=buffered, max_model_len=CONTEXT, **shape)
        self.accepted, self.aborted, self.cut_short = {}, set(), set()


class AheadMachine(BufferedMachine):
    """The same with a step prepared and sent while the one before it runs: ids are completed on the device."""

    settings = {"async_scheduling": True}  # noqa: RUF012


TestBuffered = BufferedMachine.TestCase
TestBuffered.settings = settings(max_examples=30, stateful_step_count=25)
TestAhead = AheadMachine.TestCase
TestAhead.settings = settings(max_examples=30, stateful_step_count=25)


def decode(ids, slots, tables, lens):
    """Return a decode step."""
    ints = [np.array(values, np.int32) for values in (ids, lens, slots, tables)]
    rows = np.arange(len(ids) + 1, dtype=np.int32)
    return StepInputs(
        input_ids=ints[0],
        positions=ints[1] - 1,
        slot_mapping=ints[0],
        query_start_loc=rows,
        seq_lens=ints[1],
        num_computed_tokens=ints[1] - 1,
        block_tables=ints[3],
        logits_indices=rows[:-1],
        copy_blocks=np.zeros((0, 2), np.int32),
        slots=ints[2],
    )


@given(st.data())
def test_a_table_sent_by_difference_is_the_whole_table(data):
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    here, there = RankTable(rows, width), RankTable(rows, width)
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = np.array(data.draw(st.permutations(range(rows)))[: data.draw(st.integers(1, rows))], np.int32)
        columns = data.draw(st.integers(0, width))
        flat = data.draw(st.lists(st.integers(0, 3), min_size=rows * width, max_size=rows * width))
        wanted = np.array(flat, np.int32).reshape(rows, width)[: len(chosen), :columns]
        before = here.table.copy()
        changes = here.changes(chosen, wanted)
        there.apply(changes)
        assert np.array_equal(there.read(chosen, columns), wanted)
        assert np.array_equal(here.table, there.table)
        assert changes.shape[1] == (before != here.table).sum(), "an entry was sent that was there already"


def test_growth_by_a_block_sends_one_entry():
    table = RankTable(4, 8)
    table.changes(np.array([3, 1], np.int32), np.array([[5, 6, 0], [7, 0, 0]], np.int32))
    grown = table.changes(np.array([3, 1], np.int32), np.array([[5, 6, 0], [7, 9, 0]], np.int32))
    assert grown.tolist() == [[1 * 8 + 1], [9]]
    # Rows move up when a sequence leaves, slots do not: nothing is sent again.
    assert table.changes(np.array([1], np.int32), np.array([[7, 9, 0]], np.int32)).shape == (2, 0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_of_two_buffers_none_is_overwritten_on_its_way(lengths, data):
    copies = WatchedCopies()
    pair = HostPair(copies, 5)
    target = torch.zeros(5, dtype=torch.int32)
    for number, length in enumerate(lengths):
        host = pair.next()
        host[:length] = number
        pair.send(target[:length])
        assert target[:length].tolist() == [number] * length
        assert len(copies.under_way) <= 2
    copies.check()


def test_padding_is_blank_and_a_smaller_step_leaves_nothing_behind():
    buffers = StepBuffers(64, RankTable(20, 16), CPU, WatchedCopies())
    ids = list(range(1, 13))  # 3 prompts with 4 outputs each
    buffers.load_decode(decode(ids, range(12), [[7, 8, 9]] * 12, [5] * 12), 16)
    step = buffers.decode_tensors(16)
    assert step.input_ids.tolist() == ids + [0] * 4
    assert step.positions.tolist() == [4] * 12 + [0] * 4
    assert step.seq_lens.tolist() == [5] * 12 + [0] * 4
    assert step.slot_mapping.tolist() == ids + [0] * 4
    assert step.block_tables[:, :3].tolist() == [[7, 8, 9]] * 12 + [[0, 0, 0]] * 4
    buffers.load_decode(decode([1, 2], [11, 0], [[4], [5]], [1, 1]), 16)
    # These are the same memory, as a graph needs it, apart from what is computed of them.
    assert step.input_ids.tolist() == [1, 2] + [0] * 14
    assert step.seq_lens.tolist() == [1, 1] + [0] * 14
    again = buffers.decode_tensors(16)
    assert again.block_tables[:, 0].tolist() == [4, 5] + [0] * 14
    assert again.input_ids.data_ptr() == step.input_ids.data_ptr()
    buffers.blank(16)
    assert not step.input_ids.any() and not buffers.decode_tensors(16).block_tables.any()


def test_a_mixed_step_is_padded_in_tokens_and_rows_and_leaves_nothing_behind():
    shape = MixedShape(16, 6, 4)
    buffers = StepBuffers(8, RankTable(7, 16), CPU, WatchedCopies(), shape)
    several = decode([1, 2, 3, 4, 5, 6], range(6), [[7, 8, 9]] * 6, [5] * 6)
    buffers.load_mixed(several, shape, np.arange(4, dtype=np.int32))
    step, plan = buffers.mixed_tensors(shape)
    assert plan.tolist() == [0, 1, 2, 3]
    assert step.input_ids.tolist() == [1, 2, 3, 4, 5, 6] + [0] * 10
    assert step.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
    assert step.seq_lens.tolist() == [5] * 6 + [0]
    assert step.block_tables[:, :3].tolist() == [[7, 8, 9]] * 6 + [[0, 0, 0]]
    assert step.logits_indices.tolist() == [0, 1, 2, 3, 4, 5]
    ids, _ = buffers.load_mixed(decode([8], [5], [[4]], [1]), shape, np.zeros(4, np.int32))
    assert ids.tolist() == [8]
    again, plan = buffers.mixed_tensors(shape)
    assert again.input_ids.data_ptr() == step.input_ids.data_ptr(), "a graph reads where it read before"
    assert step.input_ids.tolist() == [8] + [0] * 15
    assert step.query_start_loc.tolist() == [0] + [1] * 7
    assert again.slot_mapping.tolist() == [8] + [0] * 15
    assert again.block_tables[:, 0].tolist() == [4] + [0] * 6
    assert not plan.any()
    buffers.blank_mixed(shape)
    blank, _ = buffers.mixed_tensors(shape)
    assert not blank.query_start_loc.any() and not blank.seq_lens.any() and not blank.block_tables.any()


def test_arrays_begin_where_kernels_expect_them():
    buffers = StepBuffers(64, RankTable(20, 16), CPU, WatchedCopies())
    step, _ = buffers.load(decode([1, 2, 3], [0, 1, 2], [[4], [5], [6]], [1, 1, 1]))
    base = buffers._inputs.data_ptr()
    for tensor in (step.input_ids, step.positions, step.query_start_loc, step.seq_lens, step.logits_indices):
        assert (tensor.data_ptr() - base) % (4 * ALIGNMENT) == 0
    assert step.block_tables.stride(0) % ALIGNMENT == 0


def test_a_step_is_one_copy_and_more_only_where_very_many_blocks_are_new():
    copies = WatchedCopies()
    buffers = StepBuffers(4, RankTable(4, 400), CPU, copies)
    buffers.load(decode([1], [0], [[4]], [1]))
    buffers.load_decode(decode([1, 2], [0, 1], [[4], [5]], [1, 1]), 4)
    assert len(copies.sent) == 2
    tables = np.arange(1, 801).reshape(2, 400)
    step, _ = buffers.load(decode([1, 2], [2, 3], tables, [400, 400]))
    assert len(copies.sent) > 3
    assert np.array_equal(step.block_tables.numpy(), tables)
    buffers.load_decode(decode([8, 9], [3, 2], tables[::-1] + 1, [400, 400]), 2)
    assert buffers.decode_tensors(2).input_ids.tolist() == [8, 9]
    assert np.array_equal(buffers.decode_tensors(2).block_tables.numpy(), tables[::-1] + 1)


def test_a_copy_that_failed_is_made_good(monkeypatch):
    copies = WatchedCopies()
    buffers = StepBuffers(8, RankTable(4, 16), CPU, copies)
    buffers.load(decode([1], [2], [[4, 5]], [1]))
    step = decode([1], [2], [[4, 6]], [1])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(copies, "send", lambda source, target: (_ for _ in ()).throw(MemoryError()))
        buffers.load(step)
    assert buffers.load(step)[0].block_tables[0, :2].tolist() == [4, 6]


def test_buffers_that_are_made_anew_hold_what_the_rank_knows():
    known, step = RankTable(4, 16), decode([1], [2], [[4, 5]], [1])
    for _ in range(2):  # as after waking up
        buffers = StepBuffers(8, known, CPU, WatchedCopies())
        assert buffers.load(step)[0].block_tables[0, :3].tolist() == [4, 5, 0]


def test_forks_and_their_copies_arrive():
    shape = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    executor = BufferedExecutor(64, 4, sizes_of(shape, 64), graphs=(1, 2, 4))
    driver = Driver(executor=executor, **shape)
    one = request("r", 6, temperature=1.0, n=3, ignore_eos=True)
    alone = Driver(num_blocks=64)
    assert driver.run(one) == alone.run(one)
    assert (3, 4) in executor.widths
