"""CUDA graphs on a GPU: bits of the same step run eagerly, tokens of an eager engine, memory that was counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.worker.graph_pool import CaptureError, CudaGraphDevice
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.bench.gpu.checkpoints import checkpoint
from tests.bench.gpu.shapes import QWEN3_06B
from tests.parity.stepping import Sequence, Stepper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
SHARE = 0.25  # of the GPU's memory
SETTINGS = {"device": "cuda", "max_model_len": 2048, "max_num_seqs": 40, "gpu_memory_utilization": SHARE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = replace(QWEN3_06B, name="six-layers", layers=6)
    return checkpoint(shape, tmp_path_factory.mktemp("models"), torch.device("cuda"))


@pytest.fixture(scope="module")
def runner(folder):
    runner = ModelRunner(EngineConfig(str(folder), num_kv_blocks=2000, **SETTINGS), SoloGroup("cuda:0"))
    yield runner
    runner.close()


def prompts(count):
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 400, (count,), generator=generator).tolist()
    return [torch.randint(10, 10_000, (length,), generator=generator).tolist() for length in lengths]


def test_a_start_captures_the_largest_size_and_some_below(runner, capsys):
    pool = runner._forward.graphs.pool
    assert pool.captured == (1, 2, 4, 8, 16, 32, 40)
    assert pool.bytes_taken > 0
    with capsys.disabled():
        seconds, size = runner.phases["graphs"], pool.bytes_taken >> 20
        print(f"\n{len(pool.captured)} graphs of 6 layers: {seconds:.2f} s, {size} MiB")


@pytest.mark.parametrize("count", [1, 3, 13, 33])
def test_a_replay_has_the_bits_of_the_same_step_run_eagerly(runner, count):
    stepper = Stepper(runner)
    sequences = [Sequence(list(prompt)) for prompt in prompts(count)]
    stepper.step({i: len(s.tokens) for i, s in enumerate(sequences)}, sequences)
    graphs = runner._forward.graphs
    for _ in range(3):
        inputs = stepper.inputs(sequences, [1] * count)
        size = graphs.choose(inputs)
        with torch.inference_mode():
            replayed = runner._forward.run(inputs).rows.clone()
            graphs.step.logits.zero_()
            graphs.step.run(size)
        assert replayed.isfinite().all()
        assert torch.equal(replayed, graphs.step.logits[:count])
        for sequence, token in zip(sequences, replayed.argmax(dim=-1).tolist(), strict=True):
            sequence.computed += 1
            sequence.tokens.append(token)
    stepper.release(sequences)


@pytest.mark.parametrize(("decoding", "chunks"), [(1, [40]), (9, [100, 30, 2]), (0, [300, 5]), (20, [480])])
def test_a_replayed_mixed_step_has_the_bits_of_the_same_step_run_eagerly(runner, decoding, chunks):
    stepper = Stepper(runner)
    sequences = [Sequence(list(prompt)) for prompt in prompts(decoding)]
    if decoding:
        stepper.step({i: len(s.tokens) for i, s in enumerate(sequences)}, sequences)
    sequences += [Sequence([9] * count) for count in chunks]
    inputs = stepper.inputs(sequences, [1] * decoding + chunks)
    graphs = runner._forward.mixed
    with torch.inference_mode():
        fit = graphs.choose(inputs)
        replayed = runner._forward.run(inputs).rows.clone()
        graphs.step.results.logits.zero_()
        graphs.step.run(fit.tokens)
    assert replayed.isfinite().all()
    assert torch.equal(replayed, graphs.step.results.logits[: len(sequences)])
    stepper.release(sequences)


def test_a_size_is_captured_when_it_is_needed_for_long(runner):
    pool = runner._forward.graphs.pool
    with torch.inference_mode():
        for _ in range(pool._patience):
            chosen = pool.choose(20)
    assert chosen == 24
    assert 24 in pool.captured


def test_graphs_that_are_dropped_give_their_memory_back_and_are_captured_again(runner):
    pool = runner._forward.graphs.pool
    taken = pool.bytes_taken
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    runner._forward.drop_graphs()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - before > taken // 2
    stepper = Stepper(runner)
    sequences = [Sequence([11, 12, 13])]
    stepper.step({0: 3}, sequences)
    stepper.step({0: 1}, sequences)
    assert pool.captured == (1, 40)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_says_the_same_with_graphs_and_without(folder, ahead):
    """In float32, where the padding of a batch cannot tip the scales between two tokens."""
    asked = [SamplingParams(temperature=0, max_tokens=8 + 3 * i % 40, ignore_eos=True) for i in range(24)]
    told = []
    for eager in (True, False):
        settings = SETTINGS | {"dtype": "float32", "enforce_eager": eager, "async_scheduling": ahead}
        with LLM(folder, **settings) as llm:
            told.append([result.outputs[0].token_ids for result in llm.generate(prompts(24), asked, use_tqdm=False)])
    assert told[0] == told[1]


def test_graphs_of_all_sizes_stay_within_the_memory_that_was_asked_for(folder, capsys):
    free, total = torch.cuda.mem_get_info()
    runner = ModelRunner(EngineConfig(str(folder), **SETTINGS), SoloGroup("cuda:0"))
    pool = runner._forward.graphs.pool
    with torch.inference_mode():
        for size in reversed(pool.sizes.sizes):
            pool._capture(size)
    assert pool.captured == pool.sizes.sizes
    used = free - torch.cuda.mem_get_info()[0]
    with capsys.disabled():
        size = pool.bytes_taken >> 20
        print(f"\n{len(pool.captured)} graphs: {size} MiB; {used / total:.3f} of {SHARE} of the memory used")
    assert used < (SHARE + 0.01) * total


def test_work_that_cannot_be_recorded_spoils_neither_the_next_graph_nor_memory():
    gpu = torch.device("cuda:0")
    recorder, ones, sums = CudaGraphDevice(gpu), torch.ones(4, device=gpu), torch.zeros(4, device=gpu)
    with pytest.raises(CaptureError):
        recorder.capture(lambda: ones.sum().item())
    graph = recorder.capture(lambda: sums.add_(ones))
    sums.zero_()
    recorder.replay(graph)
    assert sums.tolist() == [1.0] * 4
    # As results do, which another stream brings to the host: their memory must be found again.
    side, size = torch.cuda.Stream(gpu), 64 << 20
    before = torch.cuda.memory_reserved(gpu)
    for _ in range(20):
        torch.empty(size, dtype=torch.uint8, device=gpu).record_stream(side)
        torch.cuda.synchronize(gpu)
    assert torch.cuda.memory_reserved(gpu) - before < 4 * size
