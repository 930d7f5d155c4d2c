"""What executors let go of when they are closed, and in which order."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.inputs.block_table import RankTable
from engine.inputs.dummy_steps import dummy_sampling, dummy_step
from engine.llm import LLM
from engine.report import NO_DRAWS
from engine.sampling_params import SamplingParams
from engine.worker.local_executor import SoloExecutor, WorkerGroupExecutor
from engine.worker.runner import ModelRunner
from parallel.errors import ChannelError, ChannelTimeout
from parallel.group import SoloGroup
from parallel.message_ring import SharedMemoryRing
from tests.cuda_shapes import FakeStream, cuda_in_shapes, why_no_shapes

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 20, "max_model_len": 128}


def test_a_gang_ends_its_workers_then_its_graphs_and_only_then_its_group():
    parts = mock.Mock()
    parts.runner.config = EngineConfig("model", **SIZES)
    parts.runner.block_table = RankTable.of(parts.runner.config)
    gang = WorkerGroupExecutor(parts.runner, parts.group, parts.channel, parts.workers)
    gang.close()
    gang.close()
    ends = [name for name, *_ in parts.mock_calls]
    # NCCL polls for the end of all graphs that hold its kernels before it frees a communicator.
    assert ends[:4] == ["workers.kill", "runner.close", "channel.close", "group.close"]
    assert ends.count("runner.close") == 1


@pytest.fixture
def gang():
    """One whose GPU never gets to the end of a step."""
    parts = mock.Mock()
    parts.runner.config = EngineConfig("model", **SIZES)
    parts.runner.block_table = RankTable.of(parts.runner.config)
    parts.runner.launch.return_value.has_run = False
    parts.workers.check.side_effect = [None, ChannelError("rank 1 was killed"), ChannelError("rank 1 was killed")]
    with (
        mock.patch("engine.worker.local_executor.LOOK_AROUND", 0.01),
        mock.patch("engine.worker.local_executor.pack_draws", lambda sampling, device: NO_DRAWS),
    ):
        yield WorkerGroupExecutor(parts.runner, parts.group, parts.channel, parts.workers), parts


@pytest.mark.timeout(20)
def test_a_gpu_that_waits_for_a_rank_that_is_gone_is_not_waited_for(gang):
    executor, parts = gang
    pending = executor.launch(dummy_step(4, 1, 16, 4), dummy_sampling(1))
    assert not pending.has_run
    with pytest.raises(EngineDeadError, match="group broke in step 1: rank 1 was killed"):
        pending.result()
    parts.runner.launch.return_value.result.assert_not_called()
    assert parts.group.close.called


@pytest.mark.timeout(20)
def test_a_step_that_a_rank_hangs_in_ends_by_its_deadline_and_names_it(gang):
    """Without a collective that this rank would wait in: its GPU alone waits for the other."""
    executor, parts = gang
    parts.workers.check.side_effect = None
    executor._timeout = 0.2
    executor._channel = ring = SharedMemoryRing.create(readers=2)
    idle, hung = (SharedMemoryRing.attach(ring.name, reader) for reader in range(2))
    pending = executor.launch(dummy_step(4, 1, 16, 4), dummy_sampling(1))
    idle.receive()
    hung.receive()
    with pytest.raises(ChannelTimeout):
        idle.receive(timeout=0.0)
    with pytest.raises(EngineDeadError, match="rank 2 did not come back from it; step_timeout is 0"):
        pending.result()
    assert parts.workers.kill.called


@pytest.mark.timeout(20)
def test_a_gang_whose_ranks_are_there_is_waited_for(gang):
    executor, parts = gang
    parts.workers.check.side_effect = None
    there = type(parts.runner.launch.return_value)
    looks = iter([False] * 300)
    there.has_run = mock.PropertyMock(side_effect=lambda: next(looks, True))
    pending = executor.launch(dummy_step(4, 1, 16, 4), dummy_sampling(1))
    assert pending.result() is parts.runner.launch.return_value.result.return_value
    assert next(looks, None) is None, "asked for before it had run"
    assert not parts.group.close.called


@pytest.fixture
def gpu():
    if (reason := why_no_shapes()) is not None:
        pytest.skip(reason)
    with cuda_in_shapes():
        yield


def loaded():
    return ModelRunner(EngineConfig("deploy/demo_model", device="cuda", **SIZES), SoloGroup("cuda:0"))


@contextmanager
def counted_references():
    """No round of the garbage collector, not even one that is asked for."""
    gc.collect()
    gc.disable()
    try:
        with mock.patch("gc.collect"):
            yield
    finally:
        gc.enable()


@pytest.mark.parametrize("close", [True, False], ids=["closed", "let go of"])
def test_a_gpu_has_its_memory_back_with_the_last_reference(gpu, close):
    runner = loaded()
    forward = runner._forward
    assert forward.graphs.pool.captured
    parts = [runner, runner.model, runner._cache, forward, forward.graphs, forward.graphs.step, forward._buffers]
    held = [weakref.ref(part) for part in parts]
    with counted_references():
        executor = SoloExecutor(runner)
        del runner, forward, parts
        if close:
            executor.close()
            executor.close()
        else:
            del executor
        assert [part() for part in held] == [None] * len(held)


@pytest.mark.parametrize("idle", [True, False])
def test_the_driver_of_a_gang_gives_memory_back_unless_steps_still_run(gpu, monkeypatch, idle):
    """Freeing waits for them, and they may wait for a rank that is gone."""
    given = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(True))
    monkeypatch.setattr(FakeStream, "query", lambda stream: idle)
    parts = mock.Mock()
    parts.group.device = torch.device("cuda:0")
    parts.runner.config = EngineConfig("model", **SIZES)
    parts.runner.block_table = RankTable.of(parts.runner.config)
    WorkerGroupExecutor(parts.runner, parts.group, parts.channel, parts.workers).close()
    assert bool(given) == idle


def test_an_llm_is_freed_with_the_last_reference_also_where_nobody_closed_it():
    llm = LLM("deploy/demo_model", device="cpu", **SIZES)
    llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=3, n=2), use_tqdm=False)
    runner = llm._core._executor._runner
    held = [weakref.ref(part) for part in (llm, runner, runner.model, runner._cache)]
    with counted_references():
        del llm, runner
        assert [part() for part in held] == [None] * len(held)


def test_a_runner_that_is_closed_has_no_graphs_asleep_or_awake(gpu):
    runner = loaded()
    graphs = runner._forward.graphs
    assert graphs.pool.captured
    runner.close()
    assert not graphs.pool.captured
    runner.sleep(1)
    runner.close()
