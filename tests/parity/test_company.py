"""What `generate` returns for a request is the same alone and in company, whatever it and the others ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests import tiny_tokenizer
from tests.long import examples
from tests.parity.tiny_models import VOCAB, make

pytestmark = pytest.mark.usefixtures("one_thread")

# Of attention whose bits do not depend on the company.
SIZES = {"device": "cpu", "dtype": "float32", "block_size": 16, "max_model_len": 64, "batch_invariant": True}
TIGHT = {"num_kv_blocks": 6, "max_num_seqs": 6, "async_scheduling": True}
prompts = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=9)
wishes = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 9),
    max_tokens=st.integers(1, 12),
    ignore_eos=st.just(True),
    logprobs=st.sampled_from([None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0, 2]),
)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def llms(request, tmp_path_factory):
    """A roomy one, and tight ones that take few and many tokens in a step."""
    folder = tmp_path_factory.mktemp("llama")
    make("llama", folder)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)
    sizes = SIZES | {"tensor_parallel_size": request.param}
    roomy = LLM(folder, **sizes, num_kv_blocks=50, enable_prefix_caching=False)
    tight = [LLM(folder, **sizes, **TIGHT, max_num_batched_tokens=budget) for budget in (5, 200)]
    yield roomy, tight
    for llm in (roomy, *tight):
        llm.close()


@settings(max_examples=examples(36), deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=st.lists(st.tuples(prompts, wishes), min_size=2, max_size=4))
def test_a_request_is_answered_as_it_is_alone(llms, asked):
    roomy, tight = llms
    ids, params = map(list, zip(*asked, strict=True))
    alone = [roomy.generate([prompt], one, use_tqdm=False)[0] for prompt, one in asked]
    for prompt, one, result in zip(ids, params, alone, strict=True):
        (single,) = roomy.generate([prompt], replace(one, n=1), use_tqdm=False)
        assert single.outputs == result.outputs[:1]
        if one.greedy:
            assert all(choice.token_ids == single.outputs[0].token_ids for choice in result.outputs)
    for llm in tight:
        found = llm.generate(ids, params, use_tqdm=False)
        assert [replace(result, num_cached_tokens=0) for result in found] == alone
