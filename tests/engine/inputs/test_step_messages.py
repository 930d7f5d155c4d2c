"""What the ranks of a group get of a step is the step, although the message holds only what is new."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from engine.config import EngineConfig
from engine.inputs.block_table import RankTable
from engine.inputs.step_buffers import StepBuffers
from engine.inputs.step_messages import PLAIN, StepReader, StepWriter
from engine.report import StepInputs
from parallel.channel import ChannelMessage, pack, unpack
from parallel.errors import ChannelError
from tests.engine.engine_driver import VOCAB
from tests.engine.inputs.test_step_buffers import decode
from tests.engine.scheduler.test_engine_state_machine import CONTEXT, EngineMachine, PromptDriver, shapes
from tests.engine.worker.graph_lab import CPU, WatchedCopies
from tests.fake_executor import FakeExecutor


def ends(**values):
    config = EngineConfig("fake", **values)
    return StepWriter(RankTable.of(config)), [StepReader(RankTable.of(config)) for _ in range(2)]


class GangOfReaders(FakeExecutor):
    """The fake model, computing what a worker was told; a second worker must be told the same."""

    def __init__(self, num_blocks, **shape) -> None:
        super().__init__(num_blocks, shape["block_size"], VOCAB)
        self._writer, self._readers = ends(max_model_len=CONTEXT, **shape)

    def execute(self, inputs, sampling):
        message = self._writer.pack(inputs, 7)
        told = [reader.read(unpack(bytes(message))) for reader in self._readers]
        for step in told:
            for name in (*PLAIN, "block_tables"):
                assert np.array_equal(getattr(step, name), getattr(inputs, name)), name
        told[0].pooled = inputs.pooled
        return super().execute(told[0], sampling)


class ToldMachine(EngineMachine):
    """Random histories of an engine whose model sees only messages."""

    @initialize(shape=shapes, tokens=st.integers(10, 44), ahead=st.booleans())
    def start(self, shape, tokens, ahead):
        blocks = 1 + tokens // shape["block_size"]
        gang = GangOfReaders(blocks, **shape)
        self.driver = PromptDriver(
            num_blocks=blocks, executor=gang, max_model_len=CONTEXT, async_scheduling=ahead, **shape
        )
        self.accepted, self.aborted, self.cut_short = {}, set(), set()


TestTold = ToldMachine.TestCase
TestTold.settings = settings(max_examples=30, stateful_step_count=25)


def test_a_message_holds_what_is_new_not_the_table():
    writer, _ = ends(max_model_len=4096, max_num_seqs=64)
    tables = np.arange(1, 64 * 256 + 1).reshape(64, 256)
    step = decode([5] * 64, range(64), tables, [4096] * 64)
    first = writer.pack(step, 1)
    assert len(first) > tables.size * 8
    unchanged = writer.pack(step, 2)
    assert len(unchanged) < 64 * 4 * 10 + 500
    step.block_tables[9, 200] = 3
    assert len(writer.pack(step, 3)) - len(unchanged) <= 16


def test_what_the_driver_found_to_be_new_is_on_the_device_of_each_rank():
    tables = [RankTable(4, 16) for _ in range(2)]
    writer, reader = StepWriter(tables[0]), StepReader(tables[1])
    driver, worker = (StepBuffers(8, table, CPU, WatchedCopies()) for table in tables)
    for number, blocks in enumerate(([[4, 5], [6, 0]], [[4, 5], [6, 7]], [[4, 9], [6, 7]])):
        step = decode([1, 2], [3, 1], blocks, [2, 2])
        same = reader.read(unpack(writer.pack(step, number)))
        for buffers, inputs in ((driver, step), (worker, same)):
            assert buffers.load(inputs)[0].block_tables[:, :2].tolist() == blocks
    assert step.table_changes.tolist() == [[3 * 16 + 1], [9]]
    assert np.array_equal(tables[0].table, tables[1].table)


def test_a_step_without_slots_is_told_as_well():
    writer, readers = ends(max_model_len=64, max_num_seqs=4)
    step = decode([5, 6], [], [[3, 4], [7, 0]], [20, 9])
    assert readers[0].read(unpack(writer.pack(step, 1))).block_tables.tolist() == [[3, 4], [7, 0]]


@pytest.mark.parametrize("kind", [1, 2])
def test_what_is_no_step_is_refused(kind):
    _, readers = ends(max_model_len=64)
    with pytest.raises(ChannelError, match=f"message 5 of kind {kind} is no step"):
        readers[0].read(unpack(pack(ChannelMessage(kind, 5, {"input_ids": np.zeros(1, np.int32)}))))


def test_every_array_of_a_step_is_told_but_what_rank_0_alone_needs():
    assert {*PLAIN, "block_tables", "pooled"} == set(StepInputs.__slots__)
