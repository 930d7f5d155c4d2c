"""Quantised weights in layers of the transformers library: made as they load, and read from checkpoints."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.llm import LLM
from engine.loader.checkpoint import open_model
from engine.loader.weights import load_model
from engine.quantization.made_int4 import MadeInt4Linear
from engine.quantization.select import made_at_load
from engine.resolve import resolve_for
from engine.sampling_params import SamplingParams
from engine.worker.footprint import footprint_of
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from parallel.linear import ParallelLinear
from tests import tiny_tokenizer
from tests.parity.census import save_oracle
from tests.parity.stepping import Stepper
from tests.parity.stored_formats import config, made
from tests.parity.test_stored_formats import check
from tests.parity.tiny_models import prompts

pytestmark = pytest.mark.usefixtures("one_thread")
INT4 = {"quantization": "int4", "quantization_group_size": 16}
MADE = {"int8": {"quantization": "int8"}, "int4": INT4}
# Stored in unlike ways: two codes a byte, by group or output, reordered by nobody, blocks, scales of two kinds.
STORED = ("int8", "int4", "int4 zeros", "fp8 channel", "deepseek", "gptq", "awq", "modelopt nvfp4", "mxfp4")


def logits_of(asked: EngineConfig) -> list[torch.Tensor]:
    generated = Stepper(ModelRunner(asked, SoloGroup())).generate(prompts(3, seed=4), 4)
    return [torch.stack(sequence.logits).float() for sequence in generated]


@pytest.mark.parametrize("weights", MADE)
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3", "qwen3_moe", "mixtral", "gpt_oss"])
def test_weights_made_at_load_are_those_of_the_native_family(models, name, weights):
    """Which has been compared with transformers: fused and single products, experts, routers that stay plain."""
    asked = config(models(name)[1], dtype="float32", **MADE[weights])
    through = logits_of(replace(asked, model_impl="transformers"))
    for found, expected in zip(through, logits_of(asked), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", STORED)
def test_a_quantised_checkpoint_says_what_its_weights_stand_for(models, tmp_path, kind):
    model, asked = made(models, tmp_path, "llama", kind)
    runner = ModelRunner(replace(asked, model_impl="transformers"), SoloGroup())
    check(model, Stepper(runner).generate)
    held = Counter(part.weight.dtype for part in runner.model.layers.modules() if isinstance(part, ParallelLinear))
    assert torch.float32 not in held or sum(held.values()) == 0


FIELDS = ("tensor_parallel_size", "model_impl", "dtype", "device", "quantization", "quantization_group_size")


def tokens_of(asked: EngineConfig) -> list[list[int]]:
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), Path(asked.model))
    values = {field: getattr(asked, field) for field in FIELDS}
    with LLM(asked.model, num_kv_blocks=200, block_size=16, **values) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts(3, seed=4), greedy)]


@pytest.mark.parametrize("kind", ["made", "int4", "deepseek"])
def test_two_ranks_say_the_same(models, tmp_path, kind):
    if kind == "made":
        asked = config(models("llama")[1], dtype="float32", model_impl="transformers", **INT4)
    else:
        asked = replace(made(models, tmp_path, "llama", kind)[1], model_impl="transformers")
    assert tokens_of(replace(asked, tensor_parallel_size=2)) == tokens_of(asked)


def test_the_plan_counts_them_to_the_byte(models, tmp_path):
    made(models, tmp_path, "llama", "int4")
    folder = open_model(str(tmp_path / "stored"), impl="transformers")
    full = resolve_for(config(folder.path, dtype="bfloat16", model_impl="transformers"), folder.config, "cuda")
    model = load_model(folder, 64, SoloGroup(), torch.bfloat16, folder.config.quantization)
    held = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    assert sum(held.values()) == footprint_of(full, folder.config).weight_bytes


def test_a_layer_at_a_time_is_plain_while_a_model_is_quantised(models, monkeypatch):
    folder = open_model(str(models("llama")[1]), impl="transformers")
    seen, models_made, load = [], [], MadeInt4Linear.load
    build = load_model.__globals__["build_model"]

    def noted(*given):
        models_made.append(build(*given))
        return models_made[-1]

    def watched(self, layer):
        linears = [part for part in models_made[0].layers.modules() if isinstance(part, ParallelLinear)]
        seen.append(sum(p.weight.untyped_storage().nbytes() > 4 and p.weight.dtype is torch.float32 for p in linears))
        load(self, layer)

    monkeypatch.setattr("engine.loader.weights.build_model", noted)
    monkeypatch.setattr(MadeInt4Linear, "load", watched)
    load_model(folder, 64, SoloGroup(), torch.float32, made_at_load("int4", 16))
    assert max(seen) <= 6  # query, key, value, output, gate and up, down
    assert len(seen) == 3 * 6


def test_experts_of_a_quantised_checkpoint_are_refused_by_name(models, tmp_path):
    _, asked = made(models, tmp_path, "qwen3_moe", "int4")
    save_file({}, tmp_path / "stored" / "model.safetensors")  # it is told before a tensor is read
    with pytest.raises(CheckpointError, match=r"mlp\.experts.*experts in one tensor, is not supported"):
        ModelRunner(replace(asked, model_impl="transformers"), SoloGroup())


def test_tensors_that_are_missing_are_named(models, tmp_path):
    _, asked = made(models, tmp_path, "llama", "int4")
    file = tmp_path / "stored" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight_scale")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight_scale"):
        ModelRunner(replace(asked, model_impl="transformers"), SoloGroup())


def test_a_family_that_is_transformers_alone_is_quantised(tmp_path):
    """olmo's norms have no weights, and nobody's family here is it."""
    oracle = save_oracle("olmo", tmp_path, hidden_size=64, intermediate_size=96)
    runner = ModelRunner(config(oracle.folder, dtype="float32", **INT4), SoloGroup())
    held = Counter(
        type(part.method).__name__ for part in runner.model.layers.modules() if isinstance(part, ParallelLinear)
    )
    assert set(held) <= {"NativeFourBitLinear", "FourBitLinear"}
    ragged = prompts(2, seed=4)
    generated = Stepper(runner).generate(ragged, 4)
    assert all(torch.isfinite(torch.stack(sequence.logits)).all() for sequence in generated)
