"""Two GPUs that draw each from its share of the vocabulary give the tokens of gathered logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.bench.gpu.checkpoints import checkpoint
from tests.bench.gpu.shapes import QWEN3_06B

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, torch sees {torch.cuda.device_count()} here"
    ),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    shape = replace(QWEN3_06B, name="two-layers", layers=2)
    folder = checkpoint(shape, tmp_path_factory.mktemp("models"), torch.device("cuda"))
    settings = {"max_model_len": 512, "max_num_seqs": 64, "gpu_memory_utilization": 0.2}
    with LLM(folder, device="cuda", tensor_parallel_size=2, enable_prefix_caching=False, **settings) as found:
        yield found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_those_of_gathered_logits(pair, monkeypatch, temperature):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 10_000, 20).tolist() for _ in range(40)]
    params = SamplingParams(temperature=temperature, seed=9, max_tokens=8, ignore_eos=True)
    tokens = []
    for fewest in (1, 1000):
        monkeypatch.setattr("engine.sampling.sharded_draw.FEWEST", fewest)
        results = pair.generate(prompts, params, use_tqdm=False)
        tokens.append([result.outputs[0].token_ids for result in results])
    assert tokens[0] == tokens[1]
