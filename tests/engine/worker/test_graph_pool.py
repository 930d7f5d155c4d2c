from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.graph_pool import CaptureError, CudaGraphDevice, GraphPool
from engine.worker.graph_sizes import GraphSizes
from tests.engine.worker.graph_lab import RerunDevice

SIZES = GraphSizes((1, 2, 4, 8, 16, 24), (4, 24))


class Memory:
    """What a graph reads and writes: a buffer that is filled in anew, and what was made of it."""

    def __init__(self) -> None:
        self.inputs = [0] * 32
        self.outputs = [0] * 32
        self.blanked = []
        self.ran = []

    def blank(self, size):
        self.inputs[:size] = [0] * size
        self.blanked.append(size)

    def decode(self, size):
        self.ran.append(size)
        self.outputs[:size] = [10 * value for value in self.inputs[:size]]


def pool_of(failing=(), sizes=SIZES, patience=3):
    memory, device = Memory(), RerunDevice(failing)
    return GraphPool(device, sizes, memory.blank, memory.decode, patience), memory, device


def run(pool, memory, values):
    size = pool.choose(len(values))
    if size is None:
        return None, [10 * value for value in values]
    memory.inputs[:size] = [*values, *[0] * (size - len(values))]
    pool.run(size)
    return size, memory.outputs[: len(values)]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), max_size=30),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 29)),
    st.booleans(),
)
def test_every_step_gives_what_it_gives_without_graphs(steps, failing, clears, at_start):
    pool, memory, device = pool_of(failing)
    if at_start:
        pool.capture_at_start()
    for number, (rows, times) in enumerate(steps):
        if number in clears:
            pool.clear()
            assert pool.captured == ()
        for repeat in range(times):
            values = [1 + rows + number + repeat + row for row in range(rows)]
            size, outputs = run(pool, memory, values)
            assert outputs == [10 * value for value in values]
            assert (size is None) == (rows > 24)
            assert size is None or size >= rows
    assert device.resets == sum(number < len(steps) for number in clears)


def test_a_start_captures_the_largest_first_and_only_what_it_must():
    pool, memory, _ = pool_of()
    pool.capture_at_start()
    assert memory.blanked == [24, 4]
    assert pool.captured == (4, 24)
    assert pool.bytes_taken == 1010


def test_a_size_is_captured_once_it_has_been_missed_for_long_enough():
    pool, memory, device = pool_of(patience=3)
    pool.capture_at_start()
    assert [run(pool, memory, [1] * 6)[0] for _ in range(4)] == [24, 24, 8, 8]
    assert pool.captured == (4, 8, 24)
    assert run(pool, memory, [1])[0] == 4
    assert device.replays == 5, "what was captured was not replayed"


def test_without_any_graph_the_first_step_captures_the_largest_and_its_own():
    pool, memory, _ = pool_of()
    assert run(pool, memory, [1] * 3)[0] == 4
    assert memory.blanked == [24, 4]


def test_graphs_that_were_dropped_are_captured_again():
    pool, memory, device = pool_of()
    for _ in range(2):
        assert run(pool, memory, [1] * 3)[0] == 4
        pool.clear()
    assert memory.blanked == [24, 4, 24, 4]
    assert device.asked == 4


def test_after_graphs_were_dropped_a_step_is_padded_as_it_was_after_the_start():
    pool, memory, _ = pool_of(patience=3)
    pool.capture_at_start()
    steps = [1, 6, 2, 20, 6]
    before = [run(pool, memory, [1] * rows)[0] for rows in steps]
    pool.clear()
    assert [run(pool, memory, [1] * rows)[0] for rows in steps] == before


def test_a_size_that_cannot_be_captured_is_run_with_its_padding_and_said_once(caplog):
    pool, memory, device = pool_of(failing={1})
    pool.capture_at_start()
    for _ in range(3):
        assert run(pool, memory, [5, 6, 7]) == (4, [50, 60, 70])
    assert pool.captured == (24,)
    assert device.replays == 0
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps of 4 sequences run without a CUDA graph: the test says so"
    ]


def test_the_estimate_counts_every_size_and_leaves_nothing():
    pool, memory, _ = pool_of()
    assert pool.estimate() == 1000 + 5 * 10
    assert pool.captured == () and pool.bytes_taken == 0
    assert memory.blanked == [24, 16]
    assert pool_of(sizes=GraphSizes((3,), (3,)))[0].estimate() == 1000
    assert pool_of(sizes=GraphSizes())[0].estimate() == 0


def test_without_sizes_nothing_is_replayed():
    pool, _, device = pool_of(sizes=GraphSizes())
    pool.capture_at_start()
    assert pool.choose(1) is None
    assert device.asked == 0


def test_what_the_work_itself_raises_is_not_hidden():
    pool, memory, _ = pool_of()
    memory.decode = pool._decode = lambda size: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pool.choose(1)
    assert pool.captured == ()


class FakeCuda:
    """As much of `torch.cuda` as recording takes; notes what was asked of it in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.free = 10_000
        self.stream = lambda stream: nullcontext()

    def Stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: self.log.append("ours waits"))

    def current_stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: self.log.append("theirs waits"))

    def graph_pool_handle(self):
        self.log.append("pool")
        return "a pool"

    def synchronize(self, device):
        self.log.append("synchronize")

    def current_device(self):
        return 1

    def mem_get_info(self, device):
        return self.free, 0

    def CUDAGraph(self):
        return SimpleNamespace(
            capture_begin=lambda pool, capture_error_mode: self.log.append(f"begin in {pool}"),
            capture_end=lambda: self.log.append("end"),
            replay=lambda: self.log.append("replay"),
        )


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr("engine.worker.graph_pool.torch.cuda", fake)
    return fake


def test_work_is_run_once_before_it_is_recorded_and_its_memory_counted(cuda):
    device = CudaGraphDevice(torch.device("cpu"))

    def work():
        cuda.log.append("work")
        cuda.free -= 100

    graph = device.capture(work)
    begin = ["ours waits", "work", "synchronize", "begin in a pool", "work", "end", "theirs waits"]
    assert cuda.log == ["pool", *begin]
    assert device.bytes_taken == 100, "memory of the first run was counted as the graph's"
    device.replay(graph)
    assert cuda.log[-1] == "replay"
    device.reset()
    assert (cuda.log[-1], device.bytes_taken) == ("pool", 0)


def test_a_recording_that_fails_is_ended_and_says_why(cuda):
    device = CudaGraphDevice(torch.device("cpu"))
    runs = iter(range(2))

    def work():
        if next(runs):
            raise RuntimeError("cannot be recorded\nand so on")

    with pytest.raises(CaptureError, match=r"^cannot be recorded$"):
        device.capture(work)
    assert cuda.log[-2:] == ["end", "theirs waits"]


def fails(message):
    def raises(*_):
        raise RuntimeError(message)

    return raises


def test_a_recording_that_cuda_cannot_end_is_ended_for_torchs_allocator(cuda, monkeypatch):
    """Torch does not: it would divert memory to the pool for good, and let nothing else be recorded into it."""
    told = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *which: told.append(which), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *which: told.append(which), raising=False)
    handles = iter(["first", "second", "third"])
    cuda.graph_pool_handle = lambda: next(handles)
    device = CudaGraphDevice(torch.device("cpu"))
    whole = cuda.CUDAGraph
    broken = whole()
    broken.capture_end = fails("capture is invalidated")
    cuda.CUDAGraph = lambda: broken
    for _ in range(2):
        with pytest.raises(CaptureError, match="invalidated"):
            device.capture(lambda: None)
    assert told == [(1, "first"), (1, "first"), (1, "second"), (1, "second")]
    cuda.CUDAGraph = whole
    device.capture(lambda: None)
    assert "begin in third" in cuda.log


def test_a_recording_that_failed_after_its_end_is_not_ended_again(cuda, monkeypatch):
    released = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fails("not recording"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *which: released.append(which), raising=False)
    broken = cuda.CUDAGraph()
    broken.capture_end = fails("no memory for the graph")
    cuda.CUDAGraph = lambda: broken
    with pytest.raises(CaptureError, match="no memory for the graph"):
        CudaGraphDevice(torch.device("cpu")).capture(lambda: None)
    assert released == []


def test_what_a_first_run_queued_before_it_failed_is_over_before_inputs_are_filled_in_again(cuda):
    """Such as one for which memory ran out: the next step would overwrite what it still reads."""
    device = CudaGraphDevice(torch.device("cpu"))
    with pytest.raises(MemoryError):
        device.capture(lambda: (_ for _ in ()).throw(MemoryError))
    assert cuda.log[-1] == "theirs waits"
