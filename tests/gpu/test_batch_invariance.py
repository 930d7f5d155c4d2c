"""With `batch_invariant` a request gets the same tokens and log-probabilities, to the bit, alone and in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.bench.gpu.checkpoints import checkpoint
from tests.bench.gpu.shapes import QWEN3_06B

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
COMPANY = 32
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True),
    "drawn": SamplingParams(
        temperature=0.8, top_p=0.95, top_k=50, seed=5, max_tokens=24, logprobs=2, ignore_eos=True
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = replace(QWEN3_06B, name="four-layers", layers=4)
    return checkpoint(shape, tmp_path_factory.mktemp("models"), torch.device("cuda"))


def opened(folder, ranks=1):
    return LLM(
        folder, device="cuda", dtype="bfloat16", batch_invariant=True, tensor_parallel_size=ranks, max_model_len=1024,
        max_num_seqs=COMPANY, max_num_batched_tokens=1000, gpu_memory_utilization=0.3, enable_prefix_caching=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(folder):
    with opened(folder) as found:
        yield found


def prompts(count):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 400, (count,), generator=generator).tolist()
    return [torch.randint(10, 10_000, (length,), generator=generator).tolist() for length in lengths]


def told(llm, asked, params):
    """Return of each prompt the tokens and all log-probabilities; which of equal alternatives are named is open."""
    outputs = [result.outputs[0] for result in llm.generate(asked, params, use_tqdm=False)]
    return [
        (output.token_ids, [(one.logprob, [value for _, value in one.top]) for one in output.logprobs])
        for output in outputs
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_alone_and_among_others_a_request_gets_the_same_bits(llm, kind):
    asked = prompts(COMPANY)  # more tokens than one step takes: prompts are cut, and mixed with decodes
    among = told(llm, asked, KINDS[kind])
    for row in (0, 7, COMPANY - 1):
        assert told(llm, [asked[row]], KINDS[kind]) == [among[row]]


def test_two_of_the_same_prompt_in_one_batch_get_the_same_bits(llm):
    asked = prompts(COMPANY)
    asked[20] = asked[3]
    among = told(llm, asked, KINDS["greedy"])
    assert among[20] == among[3]


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, torch sees {torch.cuda.device_count()} here"
)
def test_two_ranks_give_the_same_bits_alone_and_among_others(folder):
    asked = prompts(COMPANY)
    with opened(folder, ranks=2) as pair:
        among = told(pair, asked, KINDS["greedy"])
        for row in (0, COMPANY - 1):
            assert told(pair, [asked[row]], KINDS["greedy"]) == [among[row]]
