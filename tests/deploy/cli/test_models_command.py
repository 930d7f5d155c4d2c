"""`squadron models`: every family of the registry is described, by what it is made of."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from deploy.cli.models import show_models, table
from engine.errors import ConfigError
from engine.models.facts import Facts, native_facts, transformers_facts
from engine.models.registry import FAMILIES


@pytest.fixture(scope="module")
def facts() -> dict[str, Facts]:
    return {one.architecture: one for one in native_facts()}


def test_every_family_is_described_by_what_it_is_made_of(facts):
    assert list(facts) == list(FAMILIES)
    llama, mistral = facts["LlamaForCausalLM"], facts["MistralForCausalLM"]
    assert llama.model_types[0] == "llama"
    assert (llama.attention, mistral.attention) == (("full",), ("window",))
    assert llama.tensor_parallel and not llama.experts and not llama.state
    assert "int8" in llama.quantization
    assert facts["Lfm2ForCausalLM"].state and facts["DeepseekV2ForCausalLM"].attention == ("latent",)
    assert facts["Llama4ForCausalLM"].expert_parallel
    assert all(one.attention and one.tensor_parallel for one in facts.values())


def test_the_table_fits_a_terminal(facts):
    out = io.StringIO()
    Console(file=out, width=80).print(table(facts.values()))
    lines = out.getvalue().splitlines()
    assert len(lines) == len(facts) + 1
    assert "…" not in out.getvalue()


def test_decoders_of_transformers_are_listed_without_those_that_have_a_family():
    others = {one.architecture: one for one in transformers_facts()}
    assert not others.keys() & FAMILIES.keys()
    assert others["SmolLM3ForCausalLM"].tensor_parallel
    assert not others["OPTForCausalLM"].tensor_parallel


def test_names_choose_and_json_holds_all(capsys):
    show_models(["gpt2", "smollm3"], False, True)
    found = json.loads(capsys.readouterr().out)
    assert [(one["architecture"], one["implementation"]) for one in found][:2] == [
        ("GPT2LMHeadModel", "native"),
        ("SmolLM3ForCausalLM", "transformers"),
    ]
    with pytest.raises(ConfigError, match="--all"):
        show_models(["no-such-model"], False, False)
