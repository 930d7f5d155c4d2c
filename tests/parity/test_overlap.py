"""Steps that overlap say what steps one after another say, and transformers: alone, and in a gang of two ranks."""

import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams, StructuredOutput
from tests import tiny_tokenizer
from tests.parity.tiny_models import make, oracle_logits, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = tuple((first, last) for first in range(0, 199, 4) for last in range(0, 199, 3))
CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1),
    "seeded": SamplingParams(temperature=1.3, top_p=0.95, top_k=50, seed=11, max_tokens=12),
    "apart": SamplingParams(temperature=1.2, top_k=20, seed=3, max_tokens=12, stop_token_ids=[7, 70, 77]),
    "several": SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9),
    "penalised": SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=12),
    "repeated": SamplingParams(temperature=0, repetition_penalty=1.8, frequency_penalty=2, max_tokens=12),
    "worded": SamplingParams(temperature=1.0, seed=2, frequency_penalty=0.4, max_tokens=12, bad_words_ids=WORDS),
    "structured": SamplingParams(
        temperature=1.0, seed=4, max_tokens=12, structured=StructuredOutput("regex", "[a-z]+")
    ),
    "scored": SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1),
    "late": SamplingParams(temperature=1.0, seed=9, min_tokens=5, max_tokens=10),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    model = make("qwen3", folder)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)
    return model, folder


def opened(folder, **changes):
    cramped = {"num_kv_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 80}
    return LLM(folder, device="cpu", dtype="float32", block_size=4, **{**cramped, **changes})


def answers(llm):
    """Return tokens and ends of prompts that run together, each kind of request once and again."""
    asked = [params for params in CASES.values() for _ in range(2)]
    results = llm.generate(prompts(len(asked), longest=30, seed=21), asked)
    return [
        [(output.token_ids, output.finish_reason, output.logprobs) for output in result.outputs] for result in results
    ]


@pytest.fixture(scope="module")
def in_turn(checkpoint):
    with opened(checkpoint[1], async_scheduling=False) as llm:
        found = answers(llm)
        assert llm.stats().steps_ahead == 0
    return found


def tokens_of(found):
    return [[output[:2] for output in outputs] for outputs in found]


@pytest.mark.parametrize("settings", [{}, {"num_kv_blocks": 24}, {"enable_prefix_caching": False}], ids=str)
def test_overlapped_steps_change_nothing(checkpoint, in_turn, settings):
    with opened(checkpoint[1], async_scheduling=True, **settings) as llm:
        assert tokens_of(answers(llm)) == tokens_of(in_turn)
        stats = llm.stats()
        assert stats.steps_ahead > 10
        assert stats.steps_held > 0
        assert not settings.get("num_kv_blocks") or stats.preemptions > 0


def test_overlapped_greedy_tokens_are_those_of_transformers(checkpoint):
    model, folder = checkpoint
    ragged = prompts(5, seed=22)
    with opened(folder, async_scheduling=True) as llm:
        results = llm.generate(ragged, CASES["greedy"])
        assert llm.stats().steps_held == 0
    for prompt, result in zip(ragged, results, strict=True):
        tokens = result.outputs[0].token_ids
        logits = oracle_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        best = logits.max(dim=-1).values
        drawn = logits[range(len(tokens)), tokens]
        assert (best - drawn).max() < 2e-4


def test_two_ranks_get_steps_ahead_of_time(checkpoint, in_turn):
    with opened(checkpoint[1], async_scheduling=True, tensor_parallel_size=2) as llm:
        assert tokens_of(answers(llm)) == tokens_of(in_turn)
        assert llm.stats().steps_ahead > 10
