"""Models with quantised weights: from flags and from compressed-tensors checkpoints, on one rank and on two."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.loader.checkpoint import open_model
from engine.loader.weights import load_model
from engine.quantization.fp8 import Fp8Linear
from engine.quantization.fp8_weight import Fp8WeightLinear
from engine.quantization.int8 import Int8Linear
from engine.quantization.made_int4 import MadeInt4Linear
from engine.quantization.select import MADE_AT_LOAD, METHODS, quantization_of, quantize
from engine.quantization.select import made_at_load as spec_of
from engine.resolve import resolve, resolve_for
from engine.worker.footprint import footprint_of
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from parallel.linear import ParallelLinear
from parallel.parameter import ShardedParameter
from tests.parity.compressed import PROJECTIONS, SCHEMES, compress, scheme
from tests.parity.stepping import Stepper
from tests.parity.test_footprint import held_weights
from tests.parity.tiny_models import CONFIGS, check_against, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

TURNED = ("gpt_oss", "llama4_text")  # whose experts are stored as [in, out]
GROUP = 8
# What is asked of an engine, by what is made.
MADE = {"int8": {"quantization": "int8"}, "int4": {"quantization": "int4", "quantization_group_size": GROUP}}


def config(folder, **values):
    return EngineConfig(str(folder), **{"num_kv_blocks": 200, "block_size": 4, "device": "cpu", **values})


def with_weights(model, meaning):
    """The oracle with other weights."""
    state = model.state_dict()
    before = {name: state[name].clone() for name in meaning}
    model.load_state_dict(meaning, strict=False)
    return before


def in_eight_bits(form):
    def stand_for(rows):
        scale = form.scale_of(rows.abs().amax(dim=1))
        return form.quantised(rows, scale).float() * scale[:, None]

    return stand_for


def in_four_bits(rows):
    groups = rows.unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = largest / -8
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)


STAND_FOR = {"int8": in_eight_bits(METHODS["int8"]), "int4": in_four_bits}


def made_at_load(model, stand_for):
    meaning = {}
    for name, weight in model.state_dict().items():
        module, leaf = name.split(".")[-2:]
        conv1d = module in ("c_attn", "c_proj", "c_fc") and weight.ndim == 2
        experts = module == "experts" and leaf in ("gate_up_proj", "down_proj")
        if experts or (leaf == "weight" and (module in PROJECTIONS or conv1d)):
            turned = conv1d or (experts and model.config.model_type in TURNED)
            rows = weight.transpose(-1, -2) if turned else weight
            stands_for = stand_for(rows.reshape(-1, rows.shape[-1])).view_as(rows)
            meaning[name] = stands_for.transpose(-1, -2).contiguous() if turned else stands_for
    return meaning


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("weights", MADE)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_says_what_it_says_with_the_weights_that_quantised_ones_stand_for(models, name, weights, backend):
    model, folder = models(name)
    before = with_weights(model, made_at_load(model, STAND_FOR[weights]))
    try:
        runner = ModelRunner(config(folder, **MADE[weights], attention_backend=backend), SoloGroup())
        ragged = prompts(5, seed=4)
        check_against(model, Stepper(runner).generate(ragged, 6), ragged)
    finally:
        with_weights(model, before)


@pytest.mark.parametrize("weights", [{}, MADE["int4"]], ids=["plain", "int4"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["llama", "llama3_tied_biased", "gpt2"])
def test_a_head_in_eight_bits_says_what_the_one_that_it_stands_for_says(models, name, backend, weights):
    model, folder = models(name)
    before = with_weights(model, made_at_load(model, in_four_bits) if weights else {})
    head = model.lm_head.weight
    stands_for = in_eight_bits(METHODS["int8"])(head.detach())
    model.lm_head.weight = torch.nn.Parameter(stands_for, requires_grad=False)  # a tied embedding stays
    try:
        asked = config(folder, **weights, quantize_lm_head=True, attention_backend=backend)
        runner = ModelRunner(asked, SoloGroup())
        ragged = prompts(5, seed=4)
        check_against(model, Stepper(runner).generate(ragged, 6), ragged)
    finally:
        model.lm_head.weight = head
        with_weights(model, before)
    tied = name in ("llama3_tied_biased", "gpt2")
    held = {weight.dtype for weight in runner.model.head.parameters() if weight.numel() and weight.dim() == 2}
    assert held <= {torch.int8}
    assert tied == torch.equal(runner.model.table[: len(head)], head)


def test_a_head_in_eight_bits_gives_a_token_the_same_logits_alone_and_in_company(models):
    asked = config(models("llama")[1], quantize_lm_head=True, dtype="bfloat16", block_size=16)
    stepper = Stepper(ModelRunner(asked, SoloGroup()))
    ragged = prompts(3, seed=4)
    for sequence, prompt in zip(stepper.generate(ragged, 3), ragged, strict=True):
        (alone,) = stepper.generate([prompt], 3)
        assert torch.equal(torch.stack(sequence.logits), torch.stack(alone.logits))


def test_layers_of_the_transformers_library_may_have_a_head_in_eight_bits(models):
    model, folder = models("llama")
    head = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(in_eight_bits(METHODS["int8"])(head.detach()), requires_grad=False)
    try:
        runner = ModelRunner(config(folder, quantize_lm_head=True, model_impl="transformers"), SoloGroup())
        ragged = prompts(3, seed=4)
        check_against(model, Stepper(runner).generate(ragged, 4), ragged)
    finally:
        model.lm_head.weight = head


QUANTISED = {**MADE, "head": {"quantize_lm_head": True}}


@pytest.mark.parametrize("weights", QUANTISED)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_hold_and_say_what_one_does(two_ranks, models, name, weights):
    _, folder = models(name)
    asked = config(folder, **QUANTISED[weights])
    ranks = two_ranks(lambda group: ModelRunner(asked, group))

    def execute(inputs, draws):
        return two_ranks(lambda group: ranks[group.rank].execute(inputs, None if group.rank else draws))[0]

    gang = Stepper(SimpleNamespace(model=ranks[0].model, config=ranks[0].config, execute=execute))
    ragged = prompts(5, seed=4)
    together = gang.generate(ragged, 6)
    alone = Stepper(ModelRunner(asked, SoloGroup())).generate(ragged, 6)
    assert [s.tokens for s in together] == [s.tokens for s in alone]


def parameters_of(group, folder, asked):
    model = load_model(folder, 64, group, torch.float32, asked)
    return {
        name: (p.data, p.axis, p.pieces) for name, p in model.named_parameters() if isinstance(p, ShardedParameter)
    }


@pytest.mark.parametrize("weights", MADE_AT_LOAD)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_weights_are_the_same_whatever_the_number_of_ranks(two_ranks, models, name, weights):
    folder = open_model(str(models(name)[1]))
    asked = spec_of(weights, GROUP)
    whole = parameters_of(SoloGroup(), folder, asked)
    for rank, share in enumerate(two_ranks(parameters_of, folder, asked)):
        for target, (found, axis, pieces) in share.items():
            if "layers." not in target or axis is None:
                continue
            expected = whole[target][0]
            before = 0
            for piece in pieces:
                mine = expected.narrow(axis, before + piece.start, piece.size).to(torch.float32)
                assert torch.equal(found.narrow(axis, piece.offset, piece.size).to(torch.float32), mine), (
                    rank,
                    target,
                )
                before += piece.full
        for target in (t for t in share if t.endswith("weight_scale") and share[t][1] is None):
            assert torch.equal(share[target][0], whole[target][0]), "scales of rows that are split"


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_compressed_checkpoint_is_read_as_it_is(models, tmp_path, kind):
    _, plain = models("llama")
    meaning = compress(plain, tmp_path / "made", SCHEMES[kind])
    folder = open_model(str(tmp_path / "made"))
    asked = quantization_of(config(tmp_path / "made"), folder.config.quantization)
    model = load_model(folder, 64, SoloGroup(), torch.float32, asked)
    for layer in range(3):
        stem = f"model.layers.{layer}."
        for target, parts in {
            "attention.qkv": [f"{stem}self_attn.{part}_proj.weight" for part in "qkv"],
            "attention.output": [f"{stem}self_attn.o_proj.weight"],
            "mlp.up": [f"{stem}mlp.{part}_proj.weight" for part in ("gate", "up")],
            "mlp.down": [f"{stem}mlp.down_proj.weight"],
        }.items():
            linear = model.get_submodule(f"layers.{layer}.{target}")
            assert isinstance(linear.method, Fp8WeightLinear if linear.weight.is_floating_point() else Int8Linear)
            found = linear.weight.float() * linear.weight_scale[:, None]
            assert torch.equal(found, torch.cat([meaning[part] for part in parts]))


@pytest.mark.parametrize("kind", ["int", "int packed"])
def test_a_compressed_checkpoint_says_the_same_on_one_rank_and_on_two(two_ranks, models, tmp_path, kind):
    model, plain = models("llama")
    before = with_weights(model, compress(plain, tmp_path / "made", SCHEMES[kind]))
    ragged = prompts(4, seed=5)
    ranks = two_ranks(lambda group: ModelRunner(config(tmp_path / "made"), group))

    def execute(inputs, draws):
        return two_ranks(lambda group: ranks[group.rank].execute(inputs, None if group.rank else draws))[0]

    gang = Stepper(SimpleNamespace(model=ranks[0].model, config=ranks[0].config, execute=execute))
    try:
        check_against(model, gang.generate(ragged, 5), ragged)
        runner = ModelRunner(config(tmp_path / "made", quantization="compressed-tensors"), SoloGroup())
        check_against(model, Stepper(runner).generate(ragged, 5), ragged)
    finally:
        with_weights(model, before)


def test_ignored_modules_stay_plain(models, tmp_path):
    model, plain = models("llama")
    skip = ["model.layers.1.mlp.down_proj", *(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")]
    found = scheme("int", "int-quantized", activations=None, ignore=[skip[0], "re:.*layers.0.self_attn.[qkv]_proj"])
    before = with_weights(model, compress(plain, tmp_path / "made", found, skip))
    try:
        runner = ModelRunner(config(tmp_path / "made"), SoloGroup())
        ragged = prompts(4, seed=5)
        check_against(model, Stepper(runner).generate(ragged, 5), ragged)
    finally:
        with_weights(model, before)
    folder = open_model(str(tmp_path / "made"))
    loaded = load_model(folder, 64, SoloGroup(), torch.float32, folder.config.quantization)
    held = {
        name
        for name, part in loaded.named_modules()
        if isinstance(part, ParallelLinear) and part.weight.is_floating_point()
    }
    assert held == {"layers.0.attention.qkv", "layers.1.mlp.down", "head"}


def test_fp8_through_the_whole_model_is_near_the_plain_one(models, monkeypatch):
    """The arithmetic of the GPU, emulated: the engine itself refuses fp8 here."""
    model, folder = models("llama")
    monkeypatch.setattr("engine.resolve.check_device", lambda *_: None)
    runner = ModelRunner(config(folder, quantization="fp8"), SoloGroup())
    assert sum(isinstance(getattr(part, "method", None), Fp8Linear) for part in runner.model.modules()) == 12
    ragged = prompts(5, seed=4)
    for sequence, prompt in zip(Stepper(runner).generate(ragged, 4), ragged, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([sequence.tokens])).logits[0][len(prompt) - 1 : -1]
        found = torch.stack(sequence.logits)
        assert 0 < float((found - expected).norm() / expected.norm()) < 0.15


@pytest.mark.parametrize("weights", MADE_AT_LOAD)
@pytest.mark.parametrize("name", ["llama", "llama3_tied_biased", "gpt2"])
def test_the_plan_counts_quantised_weights_to_the_byte(two_ranks, models, name, weights):
    folder = open_model(str(models(name)[1]))
    asked = config(folder.path, **MADE.get(weights, {"quantization": weights}))
    for size in (1, 2):
        full = resolve_for(replace(asked, tensor_parallel_size=size, dtype="bfloat16"), folder.config, "cuda")
        planned = footprint_of(full, folder.config).weight_bytes
        held = two_ranks(held_weights, folder, full) if size == 2 else [held_weights(SoloGroup(), folder, full)]
        assert held == [planned] * size
        plain = footprint_of(
            replace(full, quantization=None, quantization_group_size=None), folder.config
        ).weight_bytes
        assert 0.5 < planned / plain < 0.9


@pytest.mark.parametrize("weights", MADE)
@pytest.mark.parametrize("name", ["llama", "granitemoe"])
def test_a_model_has_as_many_parameters_however_they_are_held(models, name, weights):
    model = open_model(str(models(name)[1]))
    found = [
        footprint_of(resolve_for(config(model.path, **asked), model.config, "cuda"), model.config).parameters
        for asked in ({}, MADE[weights])
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(("form", "dtype"), [(Int8Linear, torch.int8), (MadeInt4Linear, torch.uint8)])
def test_a_layer_at_a_time_is_plain_while_a_model_is_quantised(models, monkeypatch, form, dtype):
    """Neither all plain weights nor a second copy of them are ever in memory."""
    folder = open_model(str(models("llama")[1]))
    seen = []
    built, load = [], form.load

    def noted(layers, *asked):
        built.append(layers)
        quantize(layers, *asked)

    def watched(self, layer):
        linears = [part for part in built[0].modules() if isinstance(part, ParallelLinear)]
        seen.append(sum(p.weight.untyped_storage().nbytes() > 4 and p.weight.dtype is torch.float32 for p in linears))
        load(self, layer)

    monkeypatch.setattr("engine.loader.weights.quantize", noted)
    monkeypatch.setattr(form, "load", watched)
    asked = spec_of("int8" if form is Int8Linear else "int4", GROUP)
    model = load_model(folder, 64, SoloGroup(), torch.float32, asked)
    assert seen == 3 * [4, 3, 2, 1]
    assert {p.weight.dtype for p in model.layers.modules() if isinstance(p, ParallelLinear)} == {dtype}


def test_the_flag_is_resolved_to_what_the_checkpoint_is(models, tmp_path):
    compress(models("llama")[1], tmp_path / "made", SCHEMES["int"])
    spec = open_model(str(tmp_path / "made")).config
    for asked in (None, "compressed-tensors"):
        assert resolve(config(tmp_path / "made", quantization=asked), spec).quantization == "compressed-tensors"
    assert resolve(config("m"), open_model(str(models("llama")[1])).config).quantization is None
