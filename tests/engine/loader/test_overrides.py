"""`--hf-overrides`: what it says counts, in whichever of transformers' spellings it and config.json are."""

import pytest

from engine.errors import CheckpointError
from engine.layers.rope import RopeSpec
from engine.loader.overrides import overridden
from engine.models.config import HFConfig
from engine.models.rope_config import read_rope

NEW = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
OLD = {"max_position_embeddings": 64, "rope_theta": 5e5, "rope_scaling": None}
YARN = {"rope_type": "yarn", "factor": 4.0}


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
