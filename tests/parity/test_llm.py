"""Offline generation against transformers: the same tokens batched, chunked, cached, preempted, forked, sharded."""

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
import transformers

from engine import llm as llm_module
from engine import threads
from engine.device.core_claims import CoreRegistry
from engine.device.topology import allowed_cpus
from engine.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequestError, PromptTooLongError
from engine.llm import LLM
from engine.sampling.sharded_draw import pack_draws
from engine.sampling_params import SamplingParams, StructuredOutput
from tests import tiny_tokenizer
from tests.parity.tiny_models import make, oracle_logits, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
# Neither log-probabilities nor top-p, so that two ranks draw each from its share of the vocabulary.
APART = [
    SamplingParams(temperature=temperature, top_k=top_k, min_p=0.01, seed=3, max_tokens=12, ignore_eos=True)
    for temperature, top_k in ((0, 0), (1.2, 0), (1.2, 20), (0.8, 5), (0, 3))
]
SEEDED = SamplingParams(temperature=1.3, top_p=0.95, top_k=50, seed=11, max_tokens=12, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def oracle(folder):
    model = make("qwen3", folder)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)
    return model


def open_llm(folder, **changes):
    given = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 400, "block_size": 4} | changes
    return LLM(folder, **given)


@pytest.fixture(scope="module")
def llm(folder, oracle):
    del oracle  # the checkpoint must be there
    with open_llm(folder) as one:
        yield one


def check(oracle, results):
    """Every token is the oracle's best (or within rounding of it), and its log-probability is the oracle's."""
    for result in results:
        for output in result.outputs:
            tokens = [*result.prompt_token_ids, *output.token_ids]
            expected = oracle_logits(oracle, tokens)[len(result.prompt_token_ids) - 1 : -1].log_softmax(-1)
            chosen = expected.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
            assert torch.all(expected.max(-1).values - chosen < 1e-4), "a token that the oracle would not choose"
            found = torch.tensor([one.logprob for one in output.logprobs])
            torch.testing.assert_close(found, chosen, rtol=3e-4, atol=3e-4)
            assert output.cumulative_logprob == pytest.approx(chosen.sum().item(), rel=3e-4, abs=3e-3)


def tokens_of(results):
    return [[output.token_ids for output in result.outputs] for result in results]


def test_a_ragged_batch_matches_transformers(llm, oracle):
    ragged = prompts(9)
    results = llm.generate(ragged, GREEDY)
    assert [result.prompt_token_ids for result in results] == ragged
    assert all(len(result.outputs[0].token_ids) == 12 for result in results)
    assert {result.outputs[0].finish_reason for result in results} == {"length"}
    check(oracle, results)


def test_prompts_chunked_beside_decodes_match_transformers(folder, oracle):
    with open_llm(folder, max_num_batched_tokens=7) as small_steps:
        check(oracle, small_steps.generate(prompts(6, longest=60, seed=1), GREEDY))


def test_yarn_beyond_the_length_of_config_json_matches_transformers(folder, oracle):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    asked = [prompt * 2 for prompt in prompts(3, longest=24, seed=8)]
    with open_llm(folder, hf_overrides={"max_position_embeddings": 20, "rope_parameters": rope}) as long:
        assert long.info.config.max_model_len == 64
        results = long.generate(asked, GREEDY)
    config = transformers.AutoConfig.from_pretrained(folder, max_position_embeddings=20, rope_parameters=rope)
    stretched = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    stretched.load_state_dict(oracle.state_dict())
    check(stretched, results)


def test_cached_prefixes_match_transformers(llm, oracle):
    shared = prompts(1, longest=40, seed=2)[0] + [9] * 12
    asked = [[*shared, *tail] for tail in prompts(4, longest=5, seed=3)]
    llm.generate([shared], GREEDY)
    results = llm.generate(asked, GREEDY)
    assert all(result.num_cached_tokens >= len(shared) // 4 * 4 - 4 for result in results)
    check(oracle, results)


def test_what_was_cached_is_told_whichever_choice_ends_first(llm):
    (prompt,) = prompts(1, longest=40, seed=6)
    prompt = prompt + [7] * 20
    vocab = llm.info.model.vocab_size
    params = [
        SamplingParams(n=4, temperature=1.0, seed=seed, max_tokens=30, stop_token_ids=tuple(range(seed, vocab, 6)))
        for seed in range(8)
    ]
    llm.generate([prompt], GREEDY)
    results = llm.generate([prompt] * len(params), params)
    lengths = [[len(output.token_ids) for output in result.outputs] for result in results]
    assert any(mine[0] > min(mine) for mine in lengths)
    assert {result.num_cached_tokens for result in results} == {(len(prompt) - 1) // 4 * 4}


def test_preempted_requests_match_transformers(folder, oracle):
    with open_llm(folder, num_kv_blocks=24, max_model_len=92) as tight:
        results = tight.generate(prompts(8, longest=30, seed=4), GREEDY)
        assert tight.stats().preemptions > 0
        assert tight.stats().kv_usage == 0
    check(oracle, results)


def test_several_choices_match_transformers_and_part_by_seed(llm, oracle):
    prompt = prompts(1, seed=5)[0]
    (greedy,) = llm.generate([prompt], SamplingParams(n=3, temperature=0, max_tokens=8, logprobs=0, ignore_eos=True))
    check(oracle, [greedy])
    assert [output.index for output in greedy.outputs] == [0, 1, 2]
    (seeded,) = llm.generate([prompt], SamplingParams(n=3, temperature=1, seed=1, max_tokens=8, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in seeded.outputs}) == 3


def test_two_ranks_give_the_tokens_of_one_and_leave_no_process(folder, oracle, llm, monkeypatch):
    asked = prompts(5, seed=6)
    monkeypatch.setattr("engine.sampling.sharded_draw.FEWEST", 3)  # the last steps gather
    before = set(psutil.Process().children(recursive=True))
    with open_llm(folder, tensor_parallel_size=2) as pair:
        new = set(psutil.Process().children(recursive=True)) - before
        started = [process for process in new if "resource_tracker" not in " ".join(process.cmdline())]
        assert started
        results = pair.generate(asked, GREEDY)
        seeded = tokens_of(pair.generate(asked, SEEDED))
        drawn = []
        monkeypatch.setattr(
            "engine.worker.local_executor.pack_draws", lambda *given: drawn.append(pack_draws(*given)) or drawn[-1]
        )
        apart = tokens_of(pair.generate(asked, APART))
    check(oracle, results)
    assert seeded == tokens_of(llm.generate(asked, SEEDED))
    assert apart == tokens_of(llm.generate(asked, APART))
    assert len(drawn[-2]) == len(asked)
    assert all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in started)


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_a_request_gives_the_same_tokens_alone_and_in_company(llm, params):
    asked = prompts(6, seed=7)
    company = [SamplingParams(temperature=1.0, n=2, max_tokens=5), SamplingParams(temperature=0, max_tokens=20)] * 3
    others = prompts(6, seed=8)
    alone = [llm.generate([prompt], params)[0] for prompt in asked]
    mixed = llm.generate([*others, *asked], [*company, *[params] * 6])[6:]
    assert tokens_of(mixed) == tokens_of(alone)


def test_requests_without_seed_are_reproducible_and_differ(folder, oracle):
    del oracle
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    prompt = prompts(1, seed=9)[0]
    runs = []
    for seed in (0, 0, 5):
        with open_llm(folder, seed=seed) as one:
            runs.append(tokens_of(one.generate([prompt, prompt], params)))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def plain_token(llm, output):
    """The text of one of the later tokens that is whole letters: the models here say many broken bytes."""
    spelled = [llm.tokenizer.token_bytes(token) for token in output.token_ids[3:]]
    return next(one.decode() for one in spelled if one.isalnum() and one.isascii())


def test_stop_strings_cut_text_and_tokens_and_free_the_rest(llm):
    prompt = prompts(1, seed=10)[0]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (whole,) = llm.generate([prompt], params)
    text = whole.outputs[0].text
    stop = plain_token(llm, whole.outputs[0])
    stopping = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=(stop,))
    cut, other = llm.generate([prompt, prompt], [stopping, params])
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    count = len(cut.outputs[0].token_ids)
    assert whole.outputs[0].token_ids[:count] == cut.outputs[0].token_ids
    assert stop in llm.tokenizer.decode(cut.outputs[0].token_ids)
    assert stop not in llm.tokenizer.decode(cut.outputs[0].token_ids[:-1])
    assert other.outputs[0].token_ids == whole.outputs[0].token_ids
    assert llm.stats().kv_usage == 0


def test_one_choice_stops_and_the_others_go_on(llm):
    prompt = prompts(1, seed=10)[0]
    params = SamplingParams(n=4, temperature=1.2, seed=2, max_tokens=20, ignore_eos=True)
    (whole,) = llm.generate([prompt], params)
    stop = plain_token(llm, whole.outputs[2])
    stopping = SamplingParams(n=4, temperature=1.2, seed=2, max_tokens=20, ignore_eos=True, stop=(stop,))
    (cut,) = llm.generate([prompt], stopping)
    assert cut.outputs[2].finish_reason == "stop"
    assert [output.text for output in cut.outputs] == [output.text.split(stop)[0] for output in whole.outputs]
    assert any(output.finish_reason == "length" for output in cut.outputs)


def test_stop_tokens_end_a_choice_unless_min_tokens_forbids(llm):
    prompt = prompts(1, seed=12)[0]
    (whole,) = llm.generate([prompt], GREEDY)
    stop = whole.outputs[0].token_ids[3]
    first = whole.outputs[0].token_ids.index(stop)
    stopping = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,), ignore_eos=True)
    (cut,) = llm.generate([prompt], stopping)
    assert cut.outputs[0].token_ids == whole.outputs[0].token_ids[: first + 1]
    assert cut.outputs[0].text == llm.tokenizer.decode(whole.outputs[0].token_ids[:first])
    assert cut.outputs[0].finish_reason == "stop"
    (late,) = llm.generate(
        [prompt],
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,), min_tokens=8, ignore_eos=True),
    )
    assert len(late.outputs[0].token_ids) >= 8


def test_prompts_may_be_texts_ids_or_one_of_them(llm):
    params = SamplingParams(temperature=0, max_tokens=3)
    ids = llm.tokenizer.encode("ab")
    texts = [llm.generate(given, params)[0].outputs[0].text for given in ("ab", ["ab"], ids, [ids], [tuple(ids)])]
    assert len(set(texts)) == 1
    assert llm.generate([], params) == []
    assert llm.generate("ab", params)[0].prompt == "ab"
    assert llm.generate(ids, params)[0].prompt is None


@pytest.mark.parametrize("array", [numpy.array, torch.tensor, lambda ids: [numpy.int64(one) for one in ids]])
def test_prompts_have_the_forms_of_vllms_scripts(llm, array):
    (expected,) = llm.generate([[5, 6, 7]], GREEDY)
    ids = array([5, 6, 7])
    forms = [ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids, "prompt": "abc"}], [[5, 6, 7]]]
    assert [tokens_of(llm.generate(one, GREEDY)) for one in forms] == [tokens_of([expected])] * len(forms)
    assert len(llm.generate(numpy.array([[5, 6], [7, 8]]), GREEDY)) == 2
    assert tokens_of(llm.generate({"prompt": "ab"}, GREEDY)) == tokens_of(llm.generate("ab", GREEDY))


def test_parameters_of_vllms_scripts_are_taken(llm):
    prompt = prompts(1, longest=40, seed=5)[0]
    kind = SimpleNamespace(json=None, regex="[ab]{3}", choice=None, disable_any_whitespace=False)
    for wanted in (kind, {"regex": "[ab]{3}"}):
        (result,) = llm.generate([prompt], SamplingParams(structured_outputs=wanted, seed=1, extra_args={}))
        assert re.fullmatch("[ab]{3}", result.outputs[0].text)
    numbers = {"temperature": numpy.float64(0), "max_tokens": numpy.int64(6), "stop_token_ids": numpy.array([2])}
    plain = {"temperature": 0.0, "max_tokens": 6, "stop_token_ids": [2]}
    assert SamplingParams(**numbers) == SamplingParams(**plain, output_kind=SimpleNamespace(name="FINAL_ONLY"))
    biased = SamplingParams(logit_bias={numpy.int64(5): numpy.float32(2)})  # and where an id is there twice, the last
    assert biased == SamplingParams(logit_bias=((5, 1.0), (5, 2.0))) == SamplingParams(logit_bias={5: 2.0})
    choice = {"choice": numpy.array(["a", "b"])}
    assert SamplingParams(structured_outputs=choice).structured == StructuredOutput("choice", '["a", "b"]')
    params = SamplingParams(**plain)
    (whole,), (bare,) = (llm.generate([prompt], replace(params, detokenize=makes)) for makes in (True, False))
    assert (tokens_of([whole]), bare.outputs[0].text) == (tokens_of([bare]), "")
    assert whole.outputs[0].text
    room = llm.info.config.context_len - 6
    for keep, length in ((3, 3), (-1, room), (room, room)):
        (cut,) = llm.generate([prompt * 20], replace(params, truncate_prompt_tokens=keep))
        assert cut.prompt_token_ids == (prompt * 20)[-length:]


def test_rollouts_of_32_choices_are_the_same_as_in_company(llm):
    rollout = SamplingParams(n=32, seed=7, max_tokens=4, ignore_eos=True)
    (alone,) = llm.generate([[5, 6, 7]], rollout)
    both = llm.generate([[5, 6, 7], [8, 9]], [rollout, GREEDY])
    assert len(alone.outputs) == 32
    assert tokens_of([both[0]]) == tokens_of([alone])


@pytest.mark.parametrize(
    ("asked", "params", "error", "message"),
    [
        ([[5], [5] * 300], GREEDY, PromptTooLongError, r"prompts\[1\]: This model.* the prompt has 300 tokens"),
        ([[5], []], GREEDY, InvalidRequestError, r"prompts\[1\]"),
        ([[5], [10**6]], GREEDY, InvalidRequestError, r"prompts\[1\]"),
        ([[5], "a\ud800"], GREEDY, InvalidRequestError, r"prompts\[1\]"),
        ([[5], None], GREEDY, InvalidRequestError, r"prompts\[1\] must be a string"),
        ([[5], b"ab"], GREEDY, InvalidRequestError, r"prompts\[1\] must be a string"),
        (7, GREEDY, InvalidRequestError, r"prompts must be"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            GREEDY,
            InvalidRequestError,
            "prompts.multi_modal_data is",
        ),
        ([[5], {"prompt": None}], GREEDY, InvalidRequestError, r"prompts\[1\].prompt must be a string"),
        ([[5, 1.5]], GREEDY, InvalidRequestError, r"prompts\[0\]"),
        ([[5], [6]], [GREEDY], InvalidRequestError, r"2 prompts came with 1"),
        ([[5]], SamplingParams(max_tokens=10**6), InvalidRequestError, r"sampling_params\[0\].max_tokens"),
    ],
)
def test_bad_batches_are_refused_before_anything_runs(llm, asked, params, error, message):
    before = llm.stats()
    with pytest.raises(error, match=message):
        llm.generate(asked, params)
    assert llm.stats() == before
    assert len(llm.generate([[5]], GREEDY)) == 1


def test_unknown_settings_and_folders_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="unknown setting max_model_length; did you mean max_model_len"):
        LLM("x", max_model_length=5)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"^model: 'no-such/model' is not a folder"):
        LLM("no-such/model")


def test_arguments_of_vllms_llm_are_taken_or_answered_as_flags_are(folder, oracle):
    del oracle
    held = {"trust_remote_code": False, "swap_space": 0, "enable_chunked_prefill": True, "load_format": "auto"}
    more = {"distributed_executor_backend": "mp", "pipeline_parallel_size": 1, "disable_log_stats": True}
    with open_llm(folder, **held, **more, tokenizer_mode="auto", download_dir=None) as llm:
        assert llm.generate([[5]], GREEDY)
    for given, told in (
        ({"trust_remote_code": True}, r"no setting trust_remote_code: A checkpoint's code is never run"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size: Layers .* use tensor_parallel_size"),
        ({"distributed_executor_backend": "ray"}, r"Ranks are processes of this machine: leave it out"),
        ({"swap_space": 4}, r"no setting swap_space: Nothing is swapped"),
        ({"max_num_active_seqs": 4}, r"Use max_num_seqs"),
    ):
        with pytest.raises(ConfigError, match=told):
            LLM(str(folder), **given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"n": 129}, "n must be between 1 and 128"),
        ({"detokenize": False, "stop": ["a"]}, "stop is looked for in texts; leave detokenize out"),
        ({"detokenize": 0}, "detokenize must be True or False"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be between 1"),
        ({"output_kind": SimpleNamespace(name="DELTA")}, "output_kind must be FINAL_ONLY"),
        ({"extra_args": {"a": 1}}, "extra_args holds a, which nothing takes"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one of json, regex"),
        ({"structured_outputs": SimpleNamespace()}, "exactly one of json, regex"),
        ({"structured_outputs": {"json": {"a": {1}}}}, "structured_outputs.json is no JSON"),
    ],
)
def test_parameters_that_cannot_be_met_are_named(given, told):
    with pytest.raises(InvalidRequestError, match=told):
        SamplingParams(**given)


def test_ctrl_c_ends_the_batch_between_steps_and_leaves_the_llm_usable(llm, monkeypatch):
    (expected,) = llm.generate([[5, 6]], GREEDY)
    steps = []
    real_step = llm._core.step

    def step():
        steps.append(None)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return real_step()

    monkeypatch.setattr(llm._core, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(4), SamplingParams(max_tokens=200, ignore_eos=True))
    assert len(steps) == 4  # one more, in which the engine reports that nothing is left
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.stats().kv_usage == 0
    (again,) = llm.generate([[5, 6]], GREEDY)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_second_ctrl_c_does_not_wait_and_closes(folder, oracle, monkeypatch):
    del oracle
    with open_llm(folder) as one:

        def step():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second interrupt must end the step")

        monkeypatch.setattr(one._core, "step", step)
        with pytest.raises(KeyboardInterrupt):
            one.generate([[5]], GREEDY)
        monkeypatch.undo()
        with pytest.raises(EngineDeadError, match="closed"):
            one.generate([[5]], GREEDY)


def test_a_closed_llm_says_so(folder, oracle):
    del oracle
    one = open_llm(folder)
    one.close()
    one.close()
    with pytest.raises(EngineDeadError, match="closed"):
        one.generate([[5]], GREEDY)


def test_progress_and_tokens_per_second_go_to_stderr_on_long_runs_only(llm, capsys, monkeypatch):
    llm.generate([[5]], GREEDY)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(llm_module, "BAR_DELAY", 1e-9)
    llm.generate([[5], [6]], GREEDY)
    out, err = capsys.readouterr()
    assert out == ""
    assert "tokens/s" in err
    assert "2/2" in err
    llm.generate([[5]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def demo():
    with LLM(DEMO, device="cpu", dtype="float32", num_kv_blocks=200) as one:
        yield one


def test_the_demo_model_says_what_transformers_makes_it_say(demo):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    texts = ["def join(", "import os\n\n\nclass ", "The quick brown fox", "Return True if"]
    results = demo.generate(texts, SamplingParams(temperature=0, max_tokens=30, logprobs=0))
    check(oracle, results)


def test_a_chat_with_the_demo_model_is_recognisable(demo):
    questions = [[{"role": "user", "content": f"What does {name} do?"}] for name in ("os.path.join", "os.getcwd")]
    params = SamplingParams(temperature=0, max_tokens=40)
    one, two = demo.chat(questions, params)
    assert "path" in one.outputs[0].text
    assert one.prompt == demo.tokenizer.render_chat(questions[0])
    assert demo.chat(questions[1], params)[0].outputs[0].text == two.outputs[0].text


def test_a_bound_llm_computes_on_its_cores_and_leaves_the_thread_as_it_was(folder, oracle, monkeypatch, tmp_path):
    before = allowed_cpus()
    first = min(before)
    monkeypatch.setattr(threads, "CoreRegistry", lambda allowed: CoreRegistry(allowed, tmp_path))
    with open_llm(folder, cpu_omp_threads_bind=str(first)) as bound:
        assert allowed_cpus() == before, "who only loads a model need not run there"
        check(oracle, bound.generate(prompts(3), GREEDY, use_tqdm=False))
        assert allowed_cpus() == {first}
    assert allowed_cpus() == before
    with pytest.raises(ConfigError, match="CPU 60000, which this process may not run on; use some of") as refused:
        open_llm(folder, cpu_omp_threads_bind="60000")
    assert refused.value.flag == "cpu_omp_threads_bind"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", "1000"),
        ("import torch; ", None),  # it is too late: libgomp has read its variables
        ("os.environ['GOMP_SPINCOUNT'] = '7'; ", "7"),
        ("os.environ['OMP_WAIT_POLICY'] = 'passive'; ", None),
    ],
)
def test_threads_spin_briefly_unless_the_user_chose_otherwise(before, expected, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    code = f"import os; {before}from engine import LLM; print(os.environ.get('GOMP_SPINCOUNT'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == str(expected)
