"""Scripts of vLLM's `LLM` run as they are, or are told by name what to write instead."""

import pickle
from pathlib import Path
from shutil import copytree

import pytest

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.errors import ConfigError, InvalidRequestError
from engine.sampling_params import StructuredOutput

pytestmark = pytest.mark.usefixtures("one_thread")

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
ASKED = [{"role": "user", "content": "What does os.getcwd do?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "It returns"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = copytree(DEMO, tmp_path_factory.mktemp("demo") / "model")
    generation = folder / "generation_config.json"
    generation.write_text(generation.read_text().replace("{", '{"temperature": 0.0, "max_new_tokens": 9,', 1))
    with LLM(folder, device="cpu", dtype="float32", num_kv_blocks=200, max_model_len="1k") as one:
        yield one


def tokens_of(results):
    return [[output.token_ids for output in result.outputs] for result in results]


def test_calls_of_vllms_scripts_are_taken(llm):
    nothing = {"lora_request": None, "priority": None, "tokenization_kwargs": None, "mm_processor_kwargs": {}}
    ids = llm.tokenizer.encode("import os")
    (expected,) = llm.generate("import os", GREEDY, **nothing)
    assert tokens_of(llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY)) == tokens_of([expected])
    assert tokens_of(llm.generate("b", GREEDY, prompt_token_ids=ids)) == tokens_of([expected])
    assert llm.info.config.max_model_len == 1000
    (asked,) = llm.chat(ASKED, GREEDY, add_generation_prompt=True, continue_final_message=False, lora_request=None)
    assert tokens_of([asked]) == tokens_of(llm.chat(ASKED, GREEDY))
    (begun,) = llm.chat(BEGUN, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert begun.prompt.endswith("It returns")
    assert asked.prompt.startswith(llm.chat(ASKED, GREEDY, add_generation_prompt=False)[0].prompt)
    assert llm.embed("a", lora_request=None)


def test_the_tokenizer_is_transformers_and_what_is_set_on_it_changes_nothing_here(llm):
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert text == llm.chat(ASKED, GREEDY)[0].prompt
    assert tokenizer("import os\n", truncation=True, max_length=1)["input_ids"] != llm.tokenizer.encode("import os\n")
    assert len(llm.tokenizer.encode("import os\n")) > 1
    assert llm.get_tokenizer() is tokenizer


def test_what_a_call_leaves_open_is_what_the_model_says(llm):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=9)
    (open_,) = llm.generate("import os\n")
    assert tokens_of([open_]) == tokens_of(llm.generate("import os\n", llm.get_default_sampling_params()))
    assert len(open_.outputs[0].token_ids) == 9


def test_results_say_which_request_they_are_of_and_what_stopped_it(llm):
    first, second = llm.generate(["import os\n", "import os\n"], GREEDY)
    assert first.request_id != second.request_id
    assert first.finished
    assert first.outputs[0].stop_reason is None
    token = first.outputs[0].token_ids[2]
    text = llm.tokenizer.decode([first.outputs[0].token_ids[1]])
    ended = llm.generate(["import os\n"] * 2, [GREEDY.clone(stop_token_ids=[token]), GREEDY.clone(stop=text)])
    assert [result.outputs[0].stop_reason for result in ended] == [token, text]
    # The model names two ids that end a text: as in vLLM the tokenizer's own is no reason, another one is.
    own, other = llm.tokenizer.eos_token_id, next(one for one in (1, 5) if one != llm.tokenizer.eos_token_id)
    forced = [GREEDY.clone(allowed_token_ids=[own]), GREEDY.clone(allowed_token_ids=[other])]
    forced.append(forced[0].clone(ignore_eos=True, stop_token_ids=[own]))
    results = llm.generate(["a"] * 3, forced)
    assert [result.outputs[0].finish_reason for result in results] == ["stop"] * 3
    assert [result.outputs[0].stop_reason for result in results] == [None, other, own]


def test_parameters_are_copied_and_structured_outputs_have_vllms_name():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]+"), best_of=1, skip_clone=True)
    assert params.structured == StructuredOutput("regex", "[ab]+")
    assert params.clone() == params == pickle.loads(pickle.dumps(params))
    assert params.clone(stop="a") == SamplingParams(structured=params.structured, stop="a")
    assert SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)).structured is not None


def set_field(name, value):
    setattr(SamplingParams(), name, value)


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda: SamplingParams(best_of=2), InvalidRequestError, "no field best_of: Use n"),
        (
            lambda: SamplingParams(guided_decoding={"regex": "a"}),
            InvalidRequestError,
            "guided_decoding: Use structured",
        ),
        (lambda: SamplingParams(use_beam_search=True), InvalidRequestError, "no field use_beam_search: Use n"),
        (
            lambda: SamplingParams(temprature=1),
            InvalidRequestError,
            "unknown field temprature; did you mean temperat",
        ),
        (lambda: SamplingParams().clone(max_token=1), InvalidRequestError, "max_token; did you mean max_tokens"),
        (lambda: SamplingParams(other=1), InvalidRequestError, "unknown field other; known: n, temperature"),
        (lambda: set_field("temperature", 0.5), AttributeError, r"write params = params.clone\(temperature=0.5\)"),
        (lambda: set_field("other", 1), AttributeError, r"params.clone\(other=1\)"),
        (
            lambda: SamplingParams(
                structured_outputs=StructuredOutputsParams(regex="a", disable_any_whitespace=True)
            ),
            InvalidRequestError,
            "exactly one of json, regex.*, not regex, disable_any_whitespace",
        ),
        (lambda: LLM(DEMO, max_model_len="1x"), ConfigError, "whole number such as 32768 or 32k, not '1x'"),
        (lambda: LLM(DEMO, max_model_len="1.5K"), ConfigError, "max_model_len must be whole before K.* such as 1K"),
    ],
)
def test_what_cannot_be_met_is_named_with_what_to_write(call, error, told):
    with pytest.raises(error, match=told):
        call()


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        ("generate", {"lora_request": 1}, "no argument lora_request: Adapters are not served: merge them"),
        ("generate", {"priority": [1]}, "no argument priority: "),
        ("generate", {"sampling_param": None}, "unknown argument sampling_param; did you mean sampling_params"),
        ("chat", {"lora_request": 1}, "no argument lora_request: Adapters are not served"),
        (
            "chat",
            {"continue_final_message": True},
            "continue_final_message=True goes with add_generation_prompt=False",
        ),
        ("chat", {"chat_template_content_format": "openai"}, "chat_template_content_format: Templates get texts"),
        ("embed", {"lora_request": 1}, "no argument lora_request"),
    ],
)
def test_arguments_of_calls_that_cannot_be_met_are_named(llm, method, given, told):
    with pytest.raises(InvalidRequestError, match=told):
        getattr(llm, method)(BEGUN if method == "chat" else "a", **given)
