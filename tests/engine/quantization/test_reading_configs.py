"""How `quantization_config` is read: one scheme in the words of several libraries, and the modules that it is of."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.quantization.config import read_quantization
from engine.quantization.spec import QuantizationSpec
from tests.long import examples
from tests.parity.compressed import scheme

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def read(found: dict[str, Any]) -> QuantizationSpec:
    spec = read_quantization({"quantization_config": found})
    assert spec is not None
    return spec


ANYTHING = st.sampled_from(
    [None, True, 0, -1, 3, 1 << 70, 0.5, "", "x", "re:(", [], ["x"], [1], {}, {"x": 1}, {"x": {}}]
)
MIXED = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "FP8"}}}
CONFIGS = [
    GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"]]},
    GPTQ | {"dynamic": {"-:.*attn.*": {}, "+:.*up.*": {"bits": 8, "group_size": 32}}, "format": "gptq"},
    AWQ | {"modules_to_not_convert": ["x"]},
    AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "extra_config": {"a": {"bits": 16}, ".*b": {"bits": 8}}},
    MODELOPT | MIXED,
    MODELOPT | {"quant_algo": "NVFP4", "group_size": 16},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"},
    *(scheme(*of) for of in (("int", "pack-quantized"), ("float", "float-quantized"))),
]


def places(found: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each field of a config, and those of objects in it."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield found, name
            yield from places(value)


@settings(max_examples=examples(400))
@given(config=st.sampled_from(CONFIGS), draw=st.data())
def test_a_field_that_is_anything_is_read_or_refused(config: dict[str, Any], draw: st.DataObject) -> None:
    changed = deepcopy(config)
    where, name = draw.draw(st.sampled_from(list(places(changed))))
    where[name] = draw.draw(ANYTHING)
    try:
        spec = read_quantization({"quantization_config": changed})
    except CheckpointError as refused:
        assert "quantization_config" in str(refused)
        return
    assert spec is None or spec.of("model.layers.0.mlp.up_proj") in (None, *spec.all)


@pytest.mark.parametrize(
    ("found", "same"),
    [
        (GPTQ | {"quant_method": "GPTQ"}, GPTQ),
        (GPTQ | {"checkpoint_format": "gptq", "format": "gptq", "method": "gptq"}, GPTQ),
        (GPTQ | {"format": "gptq_v2"}, GPTQ | {"checkpoint_format": "gptq_v2"}),
        (AWQ | {"format": "gemm", "checkpoint_format": "gemm"}, AWQ | {"version": "GEMM"}),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, GPTQ),
        (AUTO_ROUND | {"packing_format": "auto_round:gptqmodel"}, GPTQ | {"checkpoint_format": "gptq_v2"}),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, AWQ),
        (MODELOPT | {"quant_algo": "W4A16_NVFP4"}, MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}),
        (MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, MODELOPT | {"quant_algo": "FP8"}),
    ],
)
def test_the_same_in_the_words_of_several_libraries(found: dict[str, Any], same: dict[str, Any]) -> None:
    assert read(found) == read(same)


def test_zeros_of_gptq_are_read_as_the_format_says() -> None:
    assert read(GPTQ).layout == "gptq"
    assert read(GPTQ | {"format": "gptq_v2"}).layout == "gptq_v2"


def test_modules_that_qwens_gptq_leaves_plain() -> None:
    named = {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}}
    spec = read(GPTQ | {"dynamic": named})
    assert spec.of("model.layers.0.linear_attn.out_proj") is None
    assert spec.of("model.layers.0.mlp.shared_expert.up_proj") is None
    assert spec.of("model.layers.0.mlp.experts.3.up_proj") is not None


def test_of_expressions_of_gptqmodel_the_first_that_fits_a_layer_decides() -> None:
    """Whether it leaves it plain or overrides something; and it fits from the beginning of the name."""
    eight = {"bits": 8, "group_size": 32}
    rules = {
        r"+:model\.layers\.0\..*attn": {},
        r".*layers\.[01]\..*q_proj": eight,
        "-:.*attn.*": {"bits": 16},
        "layers": eight,
        r"+:.*layers\.1\.": eight,
        "-:.*": True,
    }
    spec = read(GPTQ | {"dynamic": rules})
    names = ("0.self_attn.q", "1.self_attn.q", "1.self_attn.k", "1.up")
    found = {each: spec.of(f"model.layers.{each}_proj") for each in names}
    held = {each: one and (one.weights, one.group or one.block) for each, one in found.items()}
    of_eight = ("int8", (1, 32))
    assert held == {
        "0.self_attn.q": ("int4", 128),
        "1.self_attn.q": of_eight,
        "1.self_attn.k": None,
        "1.up": of_eight,
    }
    assert spec.of("model.layers.2.up_proj") is None


def test_an_expression_for_each_of_many_layers_is_compiled_once() -> None:
    rules = {rf".*layers\.{number}\.mlp\.down_proj": {"bits": 8} for number in range(1000)}
    spec, before = read(GPTQ | {"dynamic": rules}), process_time()
    found = [spec.of(f"model.layers.{number}.mlp.up_proj") for number in range(400)]
    assert all(one and one.weights == "int4" for one in found)
    assert process_time() - before < 3, "to compile them again for each layer takes several times as long"


def test_a_layer_that_autoround_names_has_what_is_said_of_it_whatever_expressions_say() -> None:
    extra = {
        ".*down_proj.*": {"bits": 8},
        "model.layers.0.mlp.down_proj": {"bits": 4},
        ".*layers.2.*": {"bits": 16},
        "model.layers.2.mlp.up_proj": {"bits": 8},
        ".*up_proj": {"bits": 16},
        "up.*": {"bits": 8},
    }
    spec = read(AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "extra_config": extra})
    names = ("0.mlp.down", "1.mlp.down", "2.mlp.down", "2.mlp.up", "2.mlp.gate", "3.mlp.up", "3.mlp.gate")
    found = [spec.of(f"model.layers.{each}_proj") for each in names]
    assert [one and one.weights for one in found] == ["int4", "int8", "int8", "int8", None, None, "int4"]


@pytest.mark.parametrize("nested", [True, False])
def test_modules_that_optimum_lists_are_quantised_and_no_others(nested: bool) -> None:
    names = ["self_attn.o_proj", "experts.1.up_proj"]
    listed: dict[str, Any] = {"modules_in_block_to_quantize": [[name] for name in names] if nested else names}
    spec = read(GPTQ | listed | {"dynamic": {"-:.*layers.3.*": {}, ".*layers.2.*up": {"bits": 8}}})
    assert spec.of("model.layers.0.self_attn.q_proj") is None
    assert spec.of("model.layers.0.mlp.experts.11.up_proj") is None
    assert spec.of("model.layers.0.mlp.shared_experts.1.up_proj") is None
    assert spec.of("model.layers.3.self_attn.o_proj") is None
    found = (spec.of(f"model.layers.{each}_proj") for each in ("0.self_attn.o", "0.mlp.experts.1.up", "2.mlp.up"))
    assert [one and one.weights for one in found] == ["int4", "int4", "int8"]


def test_a_pattern_that_fits_a_module_leaves_all_inside_it_plain() -> None:
    spec = read({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.*.self_attn", "*.mlp.gate"]})
    assert spec.of("model.layers.3.self_attn.q_proj") is None
    assert spec.of("model.layers.3.mlp.gate") is None
    assert spec.of("model.layers.3.mlp.gate_proj") is not None


def test_the_nearest_module_that_is_named_says_how_a_layer_is_held() -> None:
    layers = {
        "model.layers.1.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts.3": {"quant_algo": "FP8"},
        "model.layers.1.mlp.experts.4": {"quant_algo": None},
    }
    spec = read({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    held = [spec.of(f"model.layers.1.mlp.experts.{number}.up_proj") for number in (1, 3, 4, 13)]
    assert [each and each.weights for each in held] == ["nvfp4", "fp8", None, "nvfp4"]
    assert spec.of("model.layers.11.mlp.experts.1.up_proj") is None
    assert spec.of("model.layers.1.mlp.gate") is None


def test_layers_that_autoround_leaves_plain() -> None:
    """By their names, or by expressions that are found anywhere in them."""
    extra = {
        "model.layers.0.self_attn.q_proj": {"bits": 16, "data_type": "fp"},
        "layers\\.1\\.mlp.*": {"bits": 16},
        "model.layers.2.mlp.up_proj": {"bits": 4, "group_size": 128},
    }
    spec = read(AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "extra_config": extra})
    assert spec.of("model.layers.0.self_attn.q_proj") is None
    assert spec.of("model.layers.1.mlp.up_proj") is None
    assert spec.of("model.layers.2.mlp.up_proj") is not None
    assert spec.of("model.layers.10.self_attn.q_proj") is not None
