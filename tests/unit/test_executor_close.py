"""What executors let go of when they are closed, and in which order."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest

from engine.config import EngineConfig
from engine.local_executor import GangExecutor, SoloExecutor
from engine.runner import ModelRunner
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
