"""Quantised checkpoints against transformers in fp32 with the weights that they stand for, on one rank and on two."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.parity.stepping import Stepper
from tests.parity.stored_formats import (
    FORMATS,
    GPTQ_16,
    REORDERED,
    compressed,
    config,
    edit,
    fp8,
    gptq,
    gptq8,
    int8_groups,
    made,
    oracle,
    pack_quantized8,
    store,
)
from tests.parity.tiny_models import check_against, oracle_logits, prompts

pytestmark = pytest.mark.usefixtures("one_thread")


def check(model, generate):
    ragged = prompts(2, seed=4)
    check_against(model, generate(ragged, 4), ragged)


def gang(two_ranks, asked):
    ranks = two_ranks(lambda group: ModelRunner(asked, group))

    def execute(inputs, draws):
        return two_ranks(lambda group: ranks[group.rank].execute(inputs, None if group.rank else draws))[0]

    return Stepper(SimpleNamespace(model=ranks[0].model, config=ranks[0].config, execute=execute))


@pytest.mark.parametrize("kind", [*FORMATS, *REORDERED])
def test_one_rank_says_what_the_weights_stand_for(models, tmp_path, kind):
    """Of a model with dense layers and layers of experts."""
    model, asked = made(models, tmp_path, "qwen3_moe", kind)
    check(model, Stepper(ModelRunner(asked, SoloGroup())).generate)


@pytest.mark.parametrize("kind", FORMATS)
def test_two_ranks_say_the_same(two_ranks, models, tmp_path, kind):
    model, asked = made(models, tmp_path, "qwen3_moe", kind)
    check(model, gang(two_ranks, asked).generate)


@pytest.mark.parametrize("kind", ["gptq 8 bits", "int8 packed groups", "int8 groups"])
def test_the_last_group_of_eight_bits_may_have_fewer_inputs(two_ranks, models, tmp_path, kind):
    said = json.loads(json.dumps(FORMATS[kind][0]))
    of_weights = said["config_groups"]["group_0"]["weights"] if "config_groups" in said else said
    of_weights["group_size"] = 40
    make = {"gptq 8 bits": gptq8, "int8 packed groups": pack_quantized8, "int8 groups": int8_groups}[kind](40)
    store(models("qwen3_moe")[1], tmp_path, said, make)
    asked = config(tmp_path / "stored", dtype="float32")
    check(oracle(tmp_path), Stepper(ModelRunner(asked, SoloGroup())).generate)
    check(oracle(tmp_path), gang(two_ranks, replace(asked, tensor_parallel_size=2)).generate)


@pytest.mark.parametrize(("kind", "size"), [("gptq v2 8 bits", 1 << 70), ("deepseek", [1 << 70, 32])])
def test_groups_and_blocks_may_be_larger_than_weights(models, tmp_path, kind, size):
    found, make = FORMATS[kind]
    many = {"weight_block_size": size} if kind == "deepseek" else {"group_size": size}
    make = fp8((1 << 20, 32), name="weight_scale_inv") if kind == "deepseek" else make
    store(models("llama")[1], tmp_path, dict(found) | many, make)
    runner = ModelRunner(config(tmp_path / "stored", dtype="float32"), SoloGroup())
    check(oracle(tmp_path), Stepper(runner).generate)


@pytest.mark.parametrize(
    "kind", ["deepseek", "gptq v2", "gptq v2 8 bits", "int8 groups", "int8 packed", "fp8 tensor"]
)
def test_latent_attention_is_stored_quantised_too(models, tmp_path, kind):
    """The products of its heads, `kv_b_proj`, are made plain as they are loaded."""
    model, asked = made(models, tmp_path, "deepseek_v3", kind)
    check(model, Stepper(ModelRunner(asked, SoloGroup())).generate)


def test_experts_that_ranks_hold_whole_may_have_inputs_in_another_order(two_ranks, models, tmp_path):
    model, asked = made(models, tmp_path, "qwen3_moe", "gptq desc_act", skip=("o_proj", "layers.1.mlp.down_proj"))
    left = {"-:.*o_proj": {}, "-:.*layers.1.mlp.down_proj": {}}
    edit(tmp_path / "stored", quantization_config=dict(REORDERED["gptq desc_act"][0]) | {"dynamic": left})
    asked = replace(asked, tensor_parallel_size=2, enable_expert_parallel=True)
    check(model, gang(two_ranks, asked).generate)


def test_layers_of_one_model_may_be_held_in_unlike_ways(models, tmp_path):
    """Two groups with targets of their own, and modules that an expression leaves plain."""
    found, make = FORMATS["int4"]
    four = found["config_groups"]["group_0"] | {"format": "pack-quantized"}
    eight = compressed("float", 8, "float-quantized", "channel")["config_groups"]["group_0"]
    groups = {"a": four, "b": eight | {"targets": ["re:.*self_attn.*"], "format": "float-quantized"}}
    ignore = ["lm_head", "re:.*layers\\.1\\..*down_proj"]

    def mixed(name, weight):
        return FORMATS["fp8 channel"][1](weight) if "self_attn" in name else make(weight)

    said = dict(found) | {"config_groups": groups, "ignore": ignore, "format": "mixed-precision"}
    store(models("llama")[1], tmp_path, said, mixed, ("layers.1.mlp.down_proj",))
    runner = ModelRunner(config(tmp_path / "stored", dtype="float32"), SoloGroup())
    check(oracle(tmp_path), Stepper(runner).generate)
    held = Counter(type(part.method).__name__ for part in runner.model.layers.modules() if hasattr(part, "method"))
    assert held["FourBitLinear"] + held["NativeFourBitLinear"] == 5
    assert held["Fp8WeightLinear"] + held["NativeBlockLinear"] == 6


@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_some_layers_may_have_more_bits_than_others(two_ranks, models, tmp_path, method):
    """By expressions, one for parts of a product or one for each, or by name; and some are plain."""
    four, eight = GPTQ_16 | {"sym": True}, {"bits": 8, "group_size": 32}
    if method == "gptq":
        unlike = {"+:.*[qo]_proj": eight, "+:.*k_proj": dict(eight), "+:.*v_proj": eight | {"sym": True}}
        unlike |= {r".*layers\.1\.mlp\.down_proj": eight, "-:.*layers.0.*down_proj": {}}
        said = four | {"dynamic": unlike}
    else:
        named = {"model.layers.1.mlp.down_proj": eight, "model.layers.0.mlp.down_proj": {"bits": 16}}
        said = {
            "quant_method": method,
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 16,
            "sym": True,
        }
        said |= {"extra_config": {".*self_attn.*": eight} | named}

    def mixed(name, weight):
        more = "self_attn" in name or "layers.1.mlp.down_proj" in name
        return (gptq8(32) if more else gptq(16))(weight)

    store(models("llama")[1], tmp_path, said, mixed, ("layers.0.mlp.down_proj",))
    asked = config(tmp_path / "stored", dtype="float32")
    runner = ModelRunner(asked, SoloGroup())
    check(oracle(tmp_path), Stepper(runner).generate)
    check(oracle(tmp_path), gang(two_ranks, replace(asked, tensor_parallel_size=2)).generate)
    held = Counter(type(part.method).__name__ for part in runner.model.layers.modules() if hasattr(part, "method"))
    assert held["BlockLinear"] + held["NativeBlockLinear"] == 7
    assert held["FourBitLinear"] + held["NativeFourBitLinear"] == 4


@pytest.mark.parametrize("kind", ["int4", "deepseek", "modelopt nvfp4", "mistral", "int8", "int8 packed groups"])
def test_an_output_head_may_be_stored_quantised_too(two_ranks, models, tmp_path, kind):
    """It is made plain as it is loaded."""
    found, make = FORMATS[kind]
    store(models("llama")[1], tmp_path, dict(found) | {"ignore": [], "exclude_modules": []}, make)
    file = tmp_path / "stored" / "model.safetensors"
    tensors = load_file(file)
    stored, stands_for = make(tensors.pop("lm_head.weight").float())
    save_file(tensors | {f"lm_head.{leaf}": part.contiguous() for leaf, part in stored.items()}, file)
    model = oracle(tmp_path)
    model.lm_head.weight.data = stands_for
    asked = config(tmp_path / "stored", dtype="float32")
    check(model, Stepper(ModelRunner(asked, SoloGroup())).generate)
    check(model, gang(two_ranks, replace(asked, tensor_parallel_size=2)).generate)


def test_modelopt_may_hold_each_layer_by_an_algorithm_of_its_own(models, tmp_path):
    """Experts by the name of what they are part of, and query, key and value, not the output of attention."""
    (_, eight), (_, four) = FORMATS["modelopt fp8"], FORMATS["modelopt nvfp4"]
    folder = models("qwen3_moe")[1]
    attention = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(3) for part in "qkv"]
    experts = [f"model.layers.{layer}.mlp.experts" for layer in range(3)]
    layers = {name: {"quant_algo": "FP8"} for name in attention}
    layers |= {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in experts}
    layers |= {"mtp.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO"}}
    skip = ("o_proj", "layers.1.mlp.gate_proj", "layers.1.mlp.up_proj", "layers.1.mlp.down_proj")
    said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["mtp*"]}
    store(
        folder,
        tmp_path,
        dict(FORMATS["modelopt fp8"][0]) | said,
        lambda name, weight: (eight if "self_attn" in name else four)(weight),
        skip,
    )
    runner = ModelRunner(config(tmp_path / "stored", dtype="float32"), SoloGroup())
    check(oracle(tmp_path), Stepper(runner).generate)
    held = Counter(type(part.method).__name__ for part in runner.model.layers.modules() if hasattr(part, "method"))
    assert held["Fp8WeightLinear"] + held["NativeBlockLinear"] == 3


@pytest.mark.parametrize("kind", ["gptq", "gptq 8 bits", "fp8 block", "nvfp4", "mxfp4"])
def test_in_bfloat16_a_token_has_the_same_logits_alone_and_in_company(models, tmp_path, kind):
    model, asked = made(models, tmp_path, "qwen3_moe", kind)
    runner = ModelRunner(replace(asked, dtype="bfloat16"), SoloGroup())
    stepper, ragged = Stepper(runner), prompts(3, seed=4)
    together = stepper.generate(ragged, 3)
    for sequence, prompt in zip(together, ragged, strict=True):
        (alone,) = stepper.generate([prompt], 3)
        assert sequence.tokens == alone.tokens
        assert torch.equal(torch.stack(sequence.logits), torch.stack(alone.logits))
        expected = oracle_logits(model, sequence.tokens)[len(prompt) - 1 : -1]
        assert float((torch.stack(sequence.logits).float() - expected).norm() / expected.norm()) < 0.1
