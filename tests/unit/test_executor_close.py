"""What executors let go of when they are closed, and in which order."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.local_executor import GangExecutor, SoloExecutor
from engine.report import NO_DRAWS
from engine.runner import ModelRunner
from engine.step_tensors import dummy_sampling, dummy_step
from parallel.errors import ChannelError
from parallel.group import SoloGroup
from tests.cuda_shapes import cuda_in_shapes, why_no_shapes

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 20, "max_model_len": 128}


def test_a_gang_ends_its_workers_then_its_graphs_and_only_then_its_group():
    parts = mock.Mock()
    parts.runner.config = EngineConfig("model", **SIZES)
    gang = GangExecutor(parts.runner, parts.group, parts.channel, parts.workers)
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
    parts.runner.launch.return_value.has_run = False
    parts.workers.check.side_effect = [None, ChannelError("rank 1 was killed"), ChannelError("rank 1 was killed")]
    with (
        mock.patch("engine.local_executor.LOOK_AROUND", 0.01),
        mock.patch("engine.local_executor.pack_draws", lambda sampling, device: NO_DRAWS),
    ):
        yield GangExecutor(parts.runner, parts.group, parts.channel, parts.workers), parts


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
def executor():
    with cuda_in_shapes():
        config = EngineConfig("deploy/demo_model", device="cuda", **SIZES)
        yield SoloExecutor(ModelRunner(config, SoloGroup("cuda:0")))


@pytest.mark.skipif(why_no_shapes() is not None, reason=str(why_no_shapes()))
def test_a_gpu_has_its_memory_back_when_the_executor_is_closed(executor):
    model = weakref.ref(executor._runner.model)
    gc.disable()
    try:
        executor.close()
        executor.close()
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.skipif(why_no_shapes() is not None, reason=str(why_no_shapes()))
def test_a_runner_that_is_closed_has_no_graphs_asleep_or_awake(executor):
    runner = executor._runner
    graphs = runner._forward.graphs
    assert graphs.pool.captured
    runner.close()
    assert not graphs.pool.captured
    runner.sleep(1)
    runner.close()
