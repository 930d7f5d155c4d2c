"""Log-probabilities of prompts and embeddings against transformers: chunked, cached, in company, sharded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.errors import InvalidRequestError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests import tiny_tokenizer
from tests.parity.tiny_models import make, oracle_logits, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
ASKED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param, folder)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)
    return folder, model


def open_llm(folder, **changes):
    return LLM(folder, **{"device": "cpu", "dtype": "float32", "num_kv_blocks": 400, "block_size": 4} | changes)


def check_logprobs(model, results):
    for result in results:
        ids = result.prompt_token_ids
        expected = oracle_logits(model, ids).log_softmax(-1)
        first, *found = result.prompt_logprobs
        assert first is None
        assert [one.token_id for one in found] == ids[1:]
        chosen = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([one.logprob for one in found]), chosen, rtol=3e-4, atol=3e-4)
        if not found:
            continue
        best = torch.tensor([[value for _, value in one.top] for one in found])
        torch.testing.assert_close(best, expected[:-1].topk(3).values, rtol=3e-4, atol=3e-4)
        ranks = torch.tensor([one.rank for one in found])  # which of near equals comes first is the rounding's choice
        assert (ranks > (expected[:-1] > chosen[:, None] + 3e-4).sum(-1)).all()
        assert (ranks <= (expected[:-1] >= chosen[:, None] - 3e-4).sum(-1)).all()


def embedding(model, ids, pooling):
    with torch.inference_mode():
        states = model.base_model(torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(states[-1] if pooling == "last" else states.mean(dim=0), dim=-1)


def check_embeddings(model, results, pooling):
    for result in results:
        expected = embedding(model, result.prompt_token_ids, pooling)
        torch.testing.assert_close(torch.tensor(result.embedding), expected, rtol=3e-4, atol=3e-5)


@pytest.mark.parametrize("budget", [7, 512])
def test_prompt_logprobs_and_embeddings_are_transformers_in_any_chunks(checkpoint, budget):
    folder, model = checkpoint
    ragged = prompts(7)
    with open_llm(folder, max_num_batched_tokens=budget) as llm:
        check_logprobs(model, llm.generate(ragged, ASKED))
        cached = llm.generate(ragged, ASKED)
        assert not any(result.num_cached_tokens for result in cached)
        check_logprobs(model, cached)
        for pooling in ("last", "mean"):
            check_embeddings(model, llm.embed(ragged, pooling), pooling)
        tokens = [
            result.outputs[0].token_ids for result in llm.generate(ragged, replace(ASKED, prompt_logprobs=None))
        ]
        assert tokens == [result.outputs[0].token_ids for result in cached]


def test_long_prompts_have_their_logits_in_pieces(checkpoint, monkeypatch):
    folder, model = checkpoint
    monkeypatch.setattr("engine.worker.runner.logit_rows", lambda config, vocab: 5)
    monkeypatch.setattr("engine.worker.forward.PART_TOKENS", 16)
    ragged = prompts(5, longest=40, seed=1)
    with open_llm(folder) as llm:
        check_logprobs(model, llm.generate(ragged, ASKED))
        check_embeddings(model, llm.embed(ragged, "mean"), "mean")


def test_the_size_of_the_pieces_changes_no_bit(checkpoint, monkeypatch):
    found = []
    for rows in (1024, 64, 7, 1):
        monkeypatch.setattr("engine.worker.runner.logit_rows", lambda config, vocab, rows=rows: rows)
        with open_llm(checkpoint[0]) as llm:
            results = llm.generate(prompts(5, longest=40, seed=1), ASKED)
        found.append([(result.prompt_logprobs, result.outputs) for result in results])
    assert all(one == found[0] for one in found[1:])


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_memory_for_the_scores_of_a_prompt_ends_their_request_alone(checkpoint, monkeypatch, ranks):
    asks, other = prompts(2, longest=30, seed=3)
    plain = replace(ASKED, prompt_logprobs=None)
    with open_llm(checkpoint[0], tensor_parallel_size=ranks) as llm:
        expected = llm.generate([asks, other], plain)

        def scarce(*given):
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as during:
            during.setattr("engine.worker.step_outputs._scores", scarce)
            lost, kept = llm.generate([asks, other], [ASKED, plain])
        assert lost.outputs[0].finish_reason == "error"
        assert kept.outputs[0].token_ids == expected[1].outputs[0].token_ids
        check_logprobs(checkpoint[1], llm.generate([asks], ASKED))


@pytest.mark.parametrize(("ids", "others"), [([5, 6, 7], []), ([5, 6, 7, 8], [[90, 91, 92]])])
def test_choices_are_drawn_from_their_own_logits_where_prompts_are_scored(checkpoint, ids, others):
    scored = replace(ASKED, prompt_logprobs=0)
    asked = replace(scored, n=3, prompt_logprobs=None if others else 0)
    with open_llm(checkpoint[0]) as llm:
        (expected,) = llm.generate([ids], scored)
        found, *_ = llm.generate([ids, *others], [asked] + [scored] * len(others))
    assert [choice.token_ids for choice in found.outputs] == [expected.outputs[0].token_ids] * 3


def test_two_ranks_tell_what_one_tells(checkpoint):
    folder, model = checkpoint
    ragged = prompts(4, seed=2)
    with open_llm(folder, tensor_parallel_size=2) as llm:
        check_logprobs(model, llm.generate(ragged, ASKED))
        check_embeddings(model, llm.embed(ragged), "last")


def test_an_unknown_pooling_and_a_prompt_without_tokens_are_refused_by_name(checkpoint):
    with open_llm(checkpoint[0]) as llm:
        with pytest.raises(InvalidRequestError, match="'last' or 'mean'"):
            llm.embed(["a"], pooling="max")
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\]"):
            llm.embed([[3], []])


def test_bad_words_are_kept_out_of_the_text():
    with open_llm(DEMO) as llm:
        (free,) = llm.generate(["def main():"], SamplingParams(temperature=0, max_tokens=16))
        word = free.outputs[0].text.split()[2]
        params = SamplingParams(temperature=0, max_tokens=16, bad_words=(word,), include_stop_str_in_output=True)
        (ruled,) = llm.generate(["def main():"], params)
    assert word in free.outputs[0].text
    assert word not in ruled.outputs[0].text
