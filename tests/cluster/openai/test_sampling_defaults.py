"""Sampling parameters that a request leaves open: the model's generation_config.json has them, as in vLLM."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.anthropic.message_input import parse_messages
from cluster.anthropic.message_output import MessageWriter
from cluster.batch.ledger.records import answer_settings
from cluster.config import ClusterConfig, parse_config
from cluster.openai.call import build_requests
from cluster.openai.choices import Delta, TokenUsage
from cluster.openai.response_input import parse_response
from cluster.openai.validation import parse_chat, parse_completion
from cluster.router.models import served_model
from deploy.demo import demo_model_path
from engine.errors import ConfigError, InvalidRequestError, PromptTooLongError

SAID = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 99, "eos_token_id": 2}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model with sampling parameters of its own."""
    path = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    (path / "generation_config.json").write_text(json.dumps(SAID))
    return path


def model_of(folder: Path, **settings):
    return served_model(parse_config({"model": str(folder), "served_model_name": "m", **settings}))


def completion(model, **fields):
    return parse_completion({"model": "m", "prompt": "hi", **fields}, model).params


def chat(model, **fields):
    return parse_chat({"model": "m", "messages": MESSAGES, **fields}, model).params


def test_what_a_request_leaves_open_is_as_the_model_says(folder):
    model = model_of(folder)
    for params in (completion(model), chat(model)):
        found = (params.temperature, params.top_p, params.top_k, params.max_tokens)
        assert found == (0.6, 0.95, 20, 99)


def test_what_a_request_says_counts(folder):
    model = model_of(folder)
    assert (completion(model, temperature=0).temperature, completion(model, top_k=-1).top_k) == (0, 0)
    assert completion(model, max_tokens=3).max_tokens == 3
    assert [chat(model, **{name: 5}).max_tokens for name in ("max_tokens", "max_completion_tokens")] == [5, 5]
    assert completion(model, echo=True, max_tokens=0).max_tokens == 1


def test_no_request_gets_more_tokens_than_the_config_has(folder):
    """As vLLM reads `max_new_tokens`: who asks for more is told, or refused."""
    model = model_of(folder)
    for parse, asked in ((parse_completion, {"prompt": "hi"}), (parse_chat, {"messages": MESSAGES})):
        call = parse({"model": "m", "max_tokens": 500, **asked}, model)
        assert (call.params.max_tokens, call.ignored) == (99, ("max_tokens",))
        within = parse({"model": "m", "max_tokens": 99, **asked}, model)
        assert (within.params.max_tokens, within.ignored) == (99, ())
    chat_call = parse_chat({"model": "m", "max_completion_tokens": 500, "messages": MESSAGES}, model)
    assert chat_call.ignored == ("max_completion_tokens",)
    response = parse_response({"model": "m", "max_output_tokens": 500, "input": "hi"}, model).call
    assert (response.params.max_tokens, response.ignored) == (99, ("max_output_tokens",))
    strict = replace(model, strict_fields=True)
    with pytest.raises(InvalidRequestError, match="max_tokens must be at most 99, the max_new_tokens of ") as caught:
        parse_completion({"model": "m", "prompt": "hi", "max_tokens": 500}, strict)
    assert caught.value.param == "max_tokens"


def test_a_default_is_cut_to_the_room_that_a_prompt_leaves(folder):
    """A client that asked for no number of tokens is not told that it asked for too many."""
    model = replace(model_of(folder), max_model_len=120)
    call = parse_completion({"model": "m", "prompt": [[5] * 100, [5] * 10]}, model)
    assert [request.params.max_tokens for request in build_requests(call, model)] == [20, 99]
    asked = parse_completion({"model": "m", "prompt": [5] * 100, "max_tokens": 99}, model)
    with pytest.raises(PromptTooLongError, match="you requested 199 tokens"):
        build_requests(asked, model)


def test_a_message_that_the_config_cut_has_ended_by_its_max_tokens(folder):
    model = model_of(folder)
    fields = {"model": "m", "max_tokens": 500, "messages": MESSAGES}
    asked = parse_messages(fields, model)
    (request,) = build_requests(asked.call, model)
    writer = MessageWriter(asked, request, "m")
    writer.add(Delta(0, "a", (5,), finish_reason="length"))
    assert writer.end(TokenUsage(3, 99, 0))["stop_reason"] == "max_tokens"
    assert asked.call.ignored == ("max_tokens",)


def test_neutral_ones_can_be_had(folder):
    params = completion(model_of(folder, generation_config="vllm"))
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)
    assert chat(model_of(folder, generation_config="vllm")).max_tokens is None
    assert model_of(demo_model_path()).sampling_defaults == {}


def test_another_folder_and_single_values_can_be_given(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.1, "top_p": null}')
    overriding = {"temperature": 0.2, "repetition_penalty": 1.1}
    assert model_of(folder, generation_config=str(other)).sampling_defaults == {"temperature": 0.1}
    both = model_of(folder, generation_config=str(other), override_generation_config=overriding)
    assert both.sampling_defaults == overriding
    alone = model_of(folder, generation_config="vllm", override_generation_config='{"top_p": 0.5}')
    assert completion(alone).top_p == 0.5


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"generation_config": "/nowhere"},
            "^generation_config must be auto, vllm or a folder with generation_config",
        ),
        ({"override_generation_config": {"temperatur": 1}}, "^override_generation_config: temperatur is no sampling"),
        ({"override_generation_config": {"top_p": 7}}, "^override_generation_config: top_p"),
        ({"override_generation_config": "[]"}, "^override_generation_config: must be a JSON object"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder, settings, told):
    with pytest.raises(ConfigError, match=told) as error:
        model_of(folder, **settings)
    assert error.value.flag in settings


def test_a_file_with_values_that_no_request_may_have_is_told_of(folder):
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ConfigError, match=r"^generation_config: temperature .*correct it with override_generation_"):
        model_of(folder)
    fixed = model_of(folder, override_generation_config='{"temperature": 1}')
    assert fixed.sampling_defaults == {"temperature": 1}


def test_a_batch_is_another_one_where_its_answers_would_be_drawn_otherwise(folder):
    settings = [
        answer_settings(ClusterConfig(str(folder), generation_config=where)).get("sampling_defaults")
        for where in ("auto", "vllm")
    ]
    assert settings == [{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 99}, None]
