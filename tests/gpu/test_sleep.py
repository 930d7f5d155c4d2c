"""A GPU's memory is free while the engine sleeps, and the tokens are the same afterwards."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.worker.offload import OffloadedWeights
from tests.bench.gpu.checkpoints import checkpoint
from tests.bench.gpu.shapes import QWEN3_06B

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=24, ignore_eos=True)
LEFT = 300e6  # bytes that may stay: attention's scratch memory, and what libraries keep
BLOCKS = 2000


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    shape = replace(QWEN3_06B, name="sleeper", layers=4, tied=request.param)
    return checkpoint(shape, tmp_path_factory.mktemp("models"), torch.device("cuda:0"))


@pytest.fixture(autouse=True)
def no_workspaces_of_earlier_engines():
    """Torch keeps 32 MiB for each stream that ever multiplied; a process that serves has one engine."""
    torch._C._cuda_clearCublasWorkspaces()  # no graph that could use them is left


def tokens(llm):
    prompts = [[5, 6, 7], list(range(10, 300)), [8] * 40]
    found = [*llm.generate(prompts, GREEDY, use_tqdm=False), *llm.generate(prompts, DRAWN, use_tqdm=False)]
    return [output.token_ids for result in found for output in result.outputs]


EIGHT_BITS = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("more", [{}, {"enforce_eager": True}, {"quantization": "int8"}, EIGHT_BITS], ids=str)
def test_memory_is_given_back_and_the_tokens_stay(folder, more):
    if more is EIGHT_BITS and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no matrix units for fp8")
    settings = {"max_model_len": 1024, "num_kv_blocks": BLOCKS, "enable_sleep_mode": True, **more}
    with LLM(folder, device="cuda", **settings) as llm:
        before = tokens(llm)
        torch.cuda.synchronize()
        loaded, loaded_free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        assert loaded > 2 * LEFT
        for level in (1, 2, 1):
            llm.sleep(level)
            assert torch.cuda.memory_allocated() < LEFT
            assert torch.cuda.mem_get_info()[0] - loaded_free > loaded - LEFT, "the driver has it, not torch's cache"
            began = time.perf_counter()
            llm.wake_up()
            print(f"level {level}: {loaded / 1e9:.2f} GB awake after {time.perf_counter() - began:.3f} s")
            assert tokens(llm) == before
            assert abs(torch.cuda.memory_allocated() - loaded) < LEFT


def test_weights_can_be_woken_before_the_cache(folder):
    with LLM(folder, device="cuda", max_model_len=1024, num_kv_blocks=BLOCKS, enable_sleep_mode=True) as llm:
        before = tokens(llm)
        loaded = torch.cuda.memory_allocated()
        llm.sleep()
        llm.wake_up(["weights"])
        assert torch.cuda.memory_allocated() < loaded - LEFT / 3
        llm.wake_up(["kv_cache"])
        assert tokens(llm) == before


def test_pinned_memory_is_taken_once_and_brings_every_byte_back():
    offloaded = OffloadedWeights(pinned=True)
    made = [torch.randint(0, 255, (count,), dtype=torch.uint8, device="cuda") for count in (1, 333, 300 << 20, 8)]
    kept = [tensor.clone() for tensor in made]
    pieces = []
    for _ in range(2):
        assert offloaded.offload([*made, made[2][5:]]) == sum(tensor.nbytes for tensor in made)
        pieces.append([piece.data_ptr() for piece in offloaded._pieces])
        assert all(piece.is_pinned() for piece in offloaded._pieces)
        offloaded.restore()
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(made, kept, strict=True))
    assert pieces[0] == pieces[1]
