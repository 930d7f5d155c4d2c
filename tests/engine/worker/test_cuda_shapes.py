"""The path on CUDA, as far as shapes go: nothing mixes devices, and the host waits for results alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.inputs.dummy_steps import dummy_sampling, dummy_step
from engine.llm import LLM
from engine.report import Histories, PromptScores, StepInputs
from engine.sampling.gumbel import Draws
from engine.sampling_params import SamplingParams
from engine.worker.runner import ModelRunner, no_phases
from engine.worker.sleep import TAGS
from parallel.group import SoloGroup
from tests.cuda_shapes import cuda_in_shapes, why_no_shapes
from tests.parity.tiny_models import make

BLOCK = 16

pytestmark = pytest.mark.skipif(why_no_shapes() is not None, reason=str(why_no_shapes()))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Models with experts, sinks and latent vectors, made where tensors have contents."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("qwen3_moe", "gpt_oss", "deepseek_v3")}
    for name, folder in folders.items():
        make(name, folder)
    return folders


@pytest.fixture(scope="module")
def played(checkpoints):
    with cuda_in_shapes() as played:
        yield played


@pytest.fixture(scope="module")
def runner(played):
    return made()


def made(gpu: str = "cuda:0", on_phase=no_phases, model="deploy/demo_model", **changes) -> ModelRunner:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_kv_blocks": 70, "max_model_len": 1024}
    wanted = {"device": "cuda", "dtype": "bfloat16", "block_size": BLOCK, **sizes, **changes}
    return ModelRunner(EngineConfig(str(model), **wanted), SoloGroup(gpu), on_phase=on_phase)


def decode(num_seqs: int, length: int = 40) -> StepInputs:
    """A decode step of sequences of one length, in blocks of their own."""
    width = -(-length // BLOCK)
    tables = np.arange(1, num_seqs * width + 1, dtype=np.int32).reshape(num_seqs, width)
    lens = np.full(num_seqs, length, np.int32)
    return StepInputs(
        input_ids=np.zeros(num_seqs, np.int32),
        positions=lens - 1,
        slot_mapping=tables[:, -1] * BLOCK + (length - 1) % BLOCK,
        query_start_loc=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens=lens,
        num_computed_tokens=lens - 1,
        block_tables=tables,
        logits_indices=np.arange(num_seqs, dtype=np.int32),
        copy_blocks=np.empty((0, 2), np.int32),
    )


def sampling(num: int, **changes):
    return replace(dummy_sampling(num), **changes)


HISTORIES = Histories(np.arange(4, dtype=np.int32), np.array([2, 5, 1, 5], np.int32), np.full(4, 5, np.int32))


def full(num: int, value: float, dtype=np.float32):
    return np.full(num, value, dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": full(4, 0), "top_p": full(4, 1)},
        {"top_p": full(4, 1)},
        {"temperature": np.array([0, 1, 0, 0.5], np.float32), "top_p": full(4, 1), "top_k": full(4, 20, np.int32)},
        {"min_p": full(4, 0.1)},
        {"top_p": np.array([1, 0.5, 0.9, 0.1], np.float32), "top_k": np.array([0, 5, 0, 50], np.int32)},
        {"num_logprobs": 5},
        {"forbidden": {1: (2, 3)}, "allowed": {2: np.array([5, 6], np.int32)}, "top_p": full(4, 1)},
        {"biases": {0: (np.array([1], np.int32), np.array([2.0], np.float32))}, "top_p": full(4, 1)},
        {
            "repetition_penalty": full(4, 1.2),
            "presence_penalty": full(4, 0.5),
            "frequency_penalty": full(4, 0.5),
            "histories": HISTORIES,
        },
        {
            "histories": HISTORIES,
            "pairs": {2: (np.array([7], np.int32), np.array([8], np.int32))},
            "endings": np.array([[1, 7, 8], [1, 9, 8]], np.int32),
            "top_p": full(4, 1),
        },
        {"masks": lambda: (np.array([1], np.int32), np.zeros((1, 128), np.int32))},
    ],
    ids=[
        "greedy",
        "temperature",
        "mixed",
        "min-p",
        "top-p",
        "logprobs",
        "allowed",
        "biases",
        "penalties",
        "words",
        "masks",
    ],
)
def test_a_decode_step_draws_without_waiting_for_the_device(runner, played, changes):
    runner.launch(decode(4), sampling(4)).result()
    before = played.waits
    outputs = runner.launch(decode(4), sampling(4, **changes)).result()
    assert outputs.token_ids.shape == (4,)
    assert played.waits == before


@pytest.mark.parametrize(
    ("name", "attention"),
    [("qwen3_moe", "TritonAttention"), ("gpt_oss", "TritonAttention"), ("deepseek_v3", "TritonLatentAttention")],
)
def test_experts_sinks_and_latent_vectors_keep_the_host_out_of_a_step(played, checkpoints, name, attention):
    """So that steps are recorded in graphs."""
    runner = made(model=checkpoints[name], max_model_len=64)
    assert attention in {type(each).__name__ for each in attentions(runner)}
    assert runner.model.supports_graphs
    assert runner._forward.pools
    runner.launch(decode(4), sampling(4)).result()
    before = played.waits
    runner.launch(decode(4), sampling(4)).result()
    assert played.waits == before


def attentions(runner):
    found = runner._attention
    return getattr(found, "_backends", (found,))


def test_what_graphs_took_beside_their_own_memory_is_given_back_before_the_first_step(played, monkeypatch):
    """The runs before the recordings are on a stream of their own, whose memory no step could use."""
    log = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("given back"))
    made(on_phase=lambda name, share=None: log.append(name))
    assert log[-2:] == ["graphs", "given back"]


def test_what_a_gpu_runs_is_ours(runner, played):
    assert runner.attention_backend == "triton"
    eager = made(enforce_eager=True)
    played.kernels.clear()
    eager.launch(dummy_step(100, 3, 1024, BLOCK), sampling(3))
    launched = Counter(played.kernels)
    layers = runner.model_config.num_layers
    assert launched["norm_rotate_store"] == launched["attend"] == layers, "a launch a layer"
    played.kernels.clear()
    runner.launch(decode(4), sampling(4))
    assert "attend" not in played.kernels, "a decode step is replayed"
    runner.launch(mixed([30, 40], 3, 200), sampling(5))
    assert "attend" not in played.kernels, "so is a small one with prompts"


@pytest.mark.parametrize(
    "changes",
    [
        {"enforce_eager": True},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"quantization": "int8"},
        {"dtype": "float16", "block_size": 64},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_other_settings_run_too(played, changes):
    runner = made(**changes)
    runner.launch(dummy_step(100, 3, 1024, BLOCK), sampling(3, top_p=full(3, 1)))
    runner.launch(decode(5), sampling(5, top_p=full(5, 1)))


def test_blocks_are_cleared_for_a_backend_that_reads_them_unwritten_while_the_step_before_runs(
    runner, played, monkeypatch
):
    monkeypatch.setattr(runner._attention, "reads_unwritten", True, raising=False)
    before = played.waits
    for step in (decode(4, length=2 * BLOCK + 1), dummy_step(100, 3, 1024, BLOCK)):
        runner.launch(step, sampling(step.num_reqs))
    assert played.waits == before


def test_another_gpu_than_the_first_runs_its_own_kernels(played):
    runner = made("cuda:1")
    runner.sleep(1)
    for tag in TAGS:
        runner.wake(tag)
    for step in (dummy_step(100, 3, 1024, BLOCK), decode(3)):
        assert runner.launch(step, sampling(3)).result().token_ids.shape == (3,)
    assert played.device == 0


@pytest.mark.parametrize(
    ("device", "message", "flag"),
    [
        ("cuda", "tensor_parallel_size=2 needs a GPU for each rank, and torch sees 1", "tensor_parallel_size"),
        ("cuda:0", "device=cuda:0 is one GPU, .* tensor_parallel_size=2 needs 2; use device=cuda", "device"),
    ],
)
def test_ranks_that_would_share_a_gpu_are_refused_before_they_start(played, device, message, flag):
    with pytest.raises(ConfigError, match=message) as refused:
        LLM("deploy/demo_model", device=device, tensor_parallel_size=2)
    assert refused.value.flag == flag


def test_an_engine_wakes_from_both_depths_of_sleep(played):
    runner = made()
    for level in (1, 2):
        runner.sleep(level)
        for tag in TAGS:
            runner.wake(tag)
        assert runner.launch(decode(4), sampling(4)).result().token_ids.shape == (4,)


def mixed(prompts: list[int], num_seqs: int, length: int) -> StepInputs:
    """Sequences of `length` tokens that decode beside fresh prompts."""
    count, tokens = num_seqs + len(prompts), np.array([1] * num_seqs + prompts, np.int32)
    lens = np.array([length] * num_seqs + prompts, np.int32)
    starts = np.concatenate(([0], tokens.cumsum())).astype(np.int32)
    nowhere = np.zeros(starts[-1], np.int32)
    return replace(
        decode(1),
        input_ids=nowhere,
        positions=nowhere,
        slot_mapping=nowhere,
        query_start_loc=starts,
        seq_lens=lens,
        num_computed_tokens=lens - tokens,
        block_tables=np.zeros((count, -(-int(lens.max()) // BLOCK)), np.int32),
        logits_indices=starts[1:] - 1,
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"enforce_eager": True}, {"batch_invariant": True}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_no_request_waits_for_a_kernel_to_be_compiled(played, changes):
    played.compiled.clear()
    runner = made(**changes)
    at_start = set(played.compiled)
    for step in (
        *(decode(count, length) for count in (1, 3, 8) for length in (1, 40, 600)),
        *(mixed([20, 7], count, length) for count in (1, 2, 3) for length in (2, 300, 1000)),
        mixed([33], 0, 1),
    ):
        greedy = full(step.num_reqs, 0)
        for sampled in (sampling(step.num_reqs), sampling(step.num_reqs, temperature=greedy, num_logprobs=2)):
            runner.launch(step, sampled).result()
    assert {kernel[0] for kernel in played.compiled - at_start} == set()


@pytest.mark.parametrize("vocab", [151_936, 128_256])
def test_shares_are_drawn_by_the_kernels_of_whole_rows(played, vocab):
    from engine.kernels.triton_sampler import TritonDraws

    def compiled(draw, *given):
        played.compiled.clear()
        draw(*given)
        return set(played.compiled)

    draws, group = TritonDraws(), SoloGroup("cuda:0")
    group.rank, group.size, group.all_gather = 1, 2, lambda x, dim=-1: torch.cat((x, x), dim)
    at_start = compiled(draws.draw, torch.zeros(4, vocab, device="cuda"), sampling(4))
    for count in (1, 2, 3, 16, 33):
        own = torch.zeros(count, vocab // 2, device="cuda")
        given = (
            Draws(full(count, 0.7), full(count, 0), full(count, 0, np.int32), np.zeros(count, np.int64)),
            vocab,
            group,
        )
        assert compiled(draws.draw_share, own, *given) <= at_start


def test_prompts_and_a_prompt_in_the_middle_run(runner):
    whole = runner.launch(dummy_step(100, 3, 1024, BLOCK), sampling(3)).result()
    assert whole.token_ids.shape == (3,)
    chunk = dummy_step(64, 1, 1024, BLOCK)
    chunk.logits_indices = chunk.logits_indices[:0]
    assert runner.launch(chunk, sampling(0)).result().token_ids.shape == (0,)


def test_prompts_are_scored_pooled_and_copied(runner):
    step = dummy_step(40, 2, 1024, BLOCK)
    step.pooled = np.array([[0, 20]], np.int32)
    step.copy_blocks = np.array([[1, 2]], np.int32)
    step.logits_indices = np.arange(40, dtype=np.int32)
    scores = PromptScores(np.arange(20, dtype=np.int32), np.zeros(20, np.int32), 2)
    rows = np.array([19, 39], np.int32)
    assert runner.launch(step, sampling(2, rows=rows, prompt=scores)).result().token_ids.shape == (2,)


def test_what_would_make_the_host_wait_is_caught(played):
    x = torch.zeros(3, device="cuda")
    with pytest.raises(Exception, match="nonzero"):
        torch.nonzero(x)
    with pytest.raises(RuntimeError, match=r"(?i)device"):
        x + torch.zeros(3)


def test_an_engine_generates_with_steps_ahead_of_their_results(played):
    """All tokens are 0 here; what is shown is that nothing on the way to the next step needs them on the host."""
    sizes = {"num_kv_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 48, "block_size": BLOCK}
    with LLM("deploy/demo_model", device="cuda", dtype="bfloat16", max_model_len=256, **sizes) as llm:
        prompts = [[1 + number, *range(2, 30 + 9 * number)] for number in range(8)]
        several = {"temperature": 0.8, "ignore_eos": True, "max_tokens": 20}
        params = [
            *[SamplingParams(**several, top_p=0.9, seed=number) for number in range(3)],
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=25, logprobs=2),
            SamplingParams(**several, n=3, top_k=5),
            SamplingParams(**several, repetition_penalty=1.2, prompt_logprobs=1),
            SamplingParams(**several, min_p=0.1, logit_bias={3: 1.0}),
            SamplingParams(**several, min_tokens=3, bad_words=["import"]),
        ]
        before = played.waits
        answers = llm.generate(prompts, params, use_tqdm=False)
        assert played.waits == before
        assert llm.stats().steps_ahead > 10
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [20, 20, 20, 25, 20, 20, 20, 20]
