"""Steps that overlap on a GPU: the same tokens, results that do not wait for the next step, no word with the host."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.llm import LLM
from engine.sampling.sampler import FAILED, DeviceLogprobs, DeviceOutputs
from engine.sampling_params import SamplingParams
from engine.worker.runner import ModelRunner
from engine.worker.step_outputs import HostSide
from parallel.group import SoloGroup
from tests import tiny_tokenizer
from tests.parity.stepping import Sequence, Stepper, as_ints, sampling
from tests.parity.tiny_models import make, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

# All start together and end by length, so that the batches of a run, and with them the rounding, are the same.
WORDS = tuple((first, last) for first in range(0, 199, 4) for last in range(0, 199, 3))
CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True),
    "filtered": SamplingParams(temperature=1.2, top_p=0.9, top_k=20, seed=7, max_tokens=24, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3),
    "penalised": SamplingParams(
        temperature=0, repetition_penalty=1.8, frequency_penalty=2, max_tokens=24, ignore_eos=True
    ),
    "worded": SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, bad_words_ids=WORDS),
}
BUSY = 2_000_000_000  # cycles: about a second


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    make("qwen3", folder)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)
    return folder


def answers(folder, asked, **changes):
    settings = {"dtype": "float32", "num_kv_blocks": 200, "block_size": 16, "max_model_len": 128}
    with LLM(folder, device="cuda", **{**settings, **changes}) as llm:
        results = [llm.generate(prompts(9, longest=30, seed=1), params) for params in asked]
        stats = llm.stats()
    tokens = [[output.token_ids for output in result.outputs] for batch in results for result in batch]
    return tokens, stats


@pytest.mark.parametrize("eager", [False, True])
def test_overlapped_steps_say_what_steps_in_turn_say(folder, eager):
    in_turn, stats = answers(folder, CASES.values(), async_scheduling=False, enforce_eager=eager)
    assert stats.steps_ahead == 0
    overlapped, stats = answers(folder, CASES.values(), async_scheduling=True, enforce_eager=eager)
    assert overlapped == in_turn
    assert stats.steps_ahead == len(CASES) * 23
    assert stats.steps_held == 0


def test_steps_overlap_on_a_gpu_unless_it_is_said_otherwise(folder):
    _, stats = answers(folder, [CASES["greedy"]])
    assert stats.steps_ahead == 23


def test_stops_lengths_and_preemptions_leave_no_token_behind(folder):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, stop_token_ids=list(range(3, 200, 9)))
    cramped = {"num_kv_blocks": 14, "block_size": 16, "max_num_seqs": 8}
    found, stats = answers(folder, [params] * 3, async_scheduling=True, **cramped)
    for tokens, *_ in found:
        assert len(tokens) <= 40
        assert all(token not in params.stop_token_ids for token in tokens[:-1]), "a token after the stop"
    assert stats.kv_usage == 0


def outputs_on_device():
    ids = torch.tensor([5, FAILED, 7], dtype=torch.int32, device="cuda")
    logprobs = DeviceLogprobs(-torch.ones(3, device="cuda"), ids[:, None], torch.zeros(3, 1, device="cuda"))
    return DeviceOutputs(ids, logprobs, pooled=torch.ones(2, 4, device="cuda"))


def test_results_do_not_wait_for_what_was_queued_after_them():
    side = HostSide(torch.device("cuda"))
    side.fetch(outputs_on_device()).result()
    torch.cuda.synchronize()
    pending = side.fetch(outputs_on_device())
    torch.cuda._sleep(BUSY)
    found = pending.result()
    assert not torch.cuda.current_stream().query(), "the device was waited for"
    assert (found.token_ids.tolist(), found.failed) == ([5, 0, 7], (1,))
    assert found.pooled.tolist() == [[1.0] * 4] * 2
    assert found.logprobs.top_ids.tolist() == [[5], [FAILED], [7]]
    torch.cuda.synchronize()


def test_results_are_those_of_the_work_before_them_and_stay_as_they_are():
    side = HostSide(torch.device("cuda"))
    pendings = []
    for step in range(8):
        torch.cuda._sleep(BUSY // 100)
        ids = torch.full((256,), step, dtype=torch.int32, device="cuda")
        pendings.append(side.fetch(DeviceOutputs(ids)))
        del ids  # its memory may be given to the next step, once it was read
    found = [pending.result().token_ids for pending in pendings]
    assert [set(ids.tolist()) for ids in found] == [{step} for step in range(8)]


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 20}], ids=str)
def test_a_decode_step_is_launched_without_a_word_with_the_device(folder, values):
    config = EngineConfig(
        str(folder), device="cuda", dtype="bfloat16", num_kv_blocks=64, max_model_len=128, async_scheduling=True
    )
    stepper = Stepper(ModelRunner(config, SoloGroup("cuda:0")))
    sequences = [Sequence(list(prompt)) for prompt in prompts(4, longest=20, seed=2)]
    stepper.step({i: len(one.tokens) for i, one in enumerate(sequences)}, sequences)

    def launch():
        inputs = stepper.inputs(sequences, [1] * 4)
        inputs.carried = as_ints([[i, i] for i in range(4)])
        for one in sequences:
            one.computed += 1
            one.tokens.append(0)
        return stepper.runner.launch(inputs, sampling(4, positions=[len(one.tokens) for one in sequences], **values))

    [launch().result() for _ in range(3)]  # what is compiled or captured once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(BUSY)
        pendings = [launch() for _ in range(2)]
        busy = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert busy, "the launch waited for the device"
    assert all(len(pending.result().token_ids) == 4 for pending in pendings)
