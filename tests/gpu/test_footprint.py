"""What `squadron plan` says of a GPU against what the engine gets on one."""

from __future__ import annotations

import pytest
import torch

from deploy.capacity.fit import fit
from deploy.capacity.gpus import REPORTED, Gpu
from deploy.cli.terminal import GIB
from deploy.demo import demo_model_path
from engine.config import EngineConfig
from engine.loader.checkpoint import open_model
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def test_the_cache_of_a_gpu_is_within_5_percent_of_the_plan():
    total = torch.cuda.get_device_properties(0).total_memory
    here = Gpu("this one", total / GIB / REPORTED, bandwidth=1, fp32=1, bf16=1)
    config = EngineConfig(str(demo_model_path()), device="cuda", dtype="bfloat16", block_size=256)
    planned = fit(config, open_model(config.model).config, here)
    runner = ModelRunner(config, SoloGroup("cuda:0"))
    try:
        assert runner.config.num_kv_blocks == pytest.approx(planned.num_blocks, rel=0.05)
    finally:
        runner.close()
