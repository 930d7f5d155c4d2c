"""`--hf-overrides`: what it says counts, in whichever of transformers' spellings it and config.json are."""

import pytest

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.layers.rope import RopeSpec
from engine.loader.overrides import overridden
from engine.models.config import HFConfig, ModelConfig
from engine.models.rope_config import read_rope
from engine.resolve import resolve

NEW = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
OLD = {"max_position_embeddings": 64, "rope_theta": 5e5, "rope_scaling": None}
YARN = {"rope_type": "yarn", "factor": 4.0}
SIZES = {"architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1}


def rope(values) -> RopeSpec:
    return read_rope(HFConfig({"architectures": ["LlamaForCausalLM"], **values}), 16, 64)


@pytest.mark.parametrize("file", [OLD, NEW], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rope_counts_in_either_spelling_and_keeps_the_base(file, name):
    found = rope(overridden(file, {name: YARN}))
    assert (found.kind, found.factor, found.theta) == ("yarn", 4.0, 5e5)
    assert rope(overridden(file, {name: {**YARN, "rope_theta": 7.0}})).theta == 7.0
    assert rope(overridden(file, {name: YARN, "rope_theta": 8.0})).theta == 8.0


@pytest.mark.parametrize("file", [OLD, NEW], ids=["transformers 4", "transformers 5"])
def test_a_base_counts_and_leaves_the_rest(file):
    scaled = overridden(file, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    found = rope(overridden(scaled, {"rope_theta": 9.0}))
    assert (found.kind, found.factor, found.theta) == ("linear", 2.0, 9.0)
    assert rope(overridden(scaled, {"rope_scaling": None})).kind == "default"


def test_wrong_values_are_refused_where_they_were_ignored():
    with pytest.raises(CheckpointError, match=r"rope_theta must be a number above 0, not 'x'"):
        rope(overridden(NEW, {"rope_theta": "x"}))
    with pytest.raises(CheckpointError, match=r"hf_overrides: rope_scaling must be an object, not 'yarn'"):
        overridden(NEW, {"rope_scaling": "yarn"})


def test_settings_for_each_type_of_layer_are_replaced_as_a_whole():
    each = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}
    with pytest.raises(CheckpointError, match=r"of layer \(full_attention, sliding_attention\); override"):
        overridden(each, {"rope_theta": 1e5})
    told = {"rope_parameters": {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 1e4}}}
    assert overridden(each, told) == told


def test_what_a_text_half_alone_has_is_found_there():
    file = {"model_type": "whole", "text_config": {"model_type": "half", **NEW}}
    found = overridden(file, {"max_position_embeddings": 32, "rope_theta": 3.0, "model_type": "other"})
    assert found["text_config"]["max_position_embeddings"] == 32
    assert found["text_config"]["rope_parameters"]["rope_theta"] == 3.0
    assert (found["model_type"], found["text_config"]["model_type"]) == ("other", "half")
    found = overridden(file, {"text_config": {"rope_scaling": YARN}})
    assert rope(found["text_config"]).kind == "yarn"
    assert found["text_config"]["max_position_embeddings"] == 64


def test_nothing_else_is_changed():
    file = {**NEW, "vocab_size": 9, "text_config": None}
    assert overridden(file, {"vocab_size": 10}) == {**file, "vocab_size": 10}
    assert overridden(file, {}) == file
    assert overridden({"text_config": {"a": 1}}, {"text_config": "b"}) == {"text_config": "b"}


@pytest.mark.parametrize("file", [OLD, NEW], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 32}}, 128),  # Qwen3: 40,960, from 32,768
        ({"rope_scaling": YARN}, 256),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}}, 64),  # its factor is the rest
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 64),
    ],
)
def test_yarn_serves_as_many_tokens_as_its_factor_says(file, values, limit):
    model = ModelConfig.of(overridden(SIZES | file, values))
    assert resolve(EngineConfig("folder", device="cpu"), model).context_len == limit
    assert resolve(EngineConfig("folder", device="cpu", max_model_len=limit), model).context_len == limit
    with pytest.raises(ConfigError, match=f"beyond the model's {limit} positions"):
        resolve(EngineConfig("folder", device="cpu", max_model_len=limit + 1), model)


@pytest.mark.parametrize("factor", [0, "4", 1e30, 1e-9])
def test_a_factor_that_makes_no_length_is_refused_by_name(factor):
    with pytest.raises(CheckpointError, match=r"config.json: rope_scaling: factor"):
        ModelConfig.of({**SIZES, **OLD, "rope_scaling": {**YARN, "factor": factor}})
