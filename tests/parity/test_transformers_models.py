"""Models through transformers' own layers: its tokens, whatever the cache and the company; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.errors import CheckpointError, ConfigError
from engine.llm import LLM
from engine.loader.checkpoint import open_model
from engine.loader.kv_scales import read_kv_scales
from engine.loader.weights import load_model
from engine.models.blueprint import blueprint
from engine.models.config import ModelConfig
from engine.models.registry import FAMILIES
from engine.sampling_params import SamplingParams
from parallel.errors import ShardingError
from parallel.group import SoloGroup
from tests.parity.census import (
    NATIVE,
    NOT_SMALL,
    ONE_RANK,
    REFUSED,
    TYPES,
    Oracle,
    check,
    model_config,
    save_oracle,
    tiny_config,
    why_no_tiny_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")
# One of each kind: norms, windows, caps and scales (gemma3), fused products (phi3), a norm after each block (olmo2),
# multipliers (granite), parallel blocks and LayerNorm (cohere2, gpt_neox), experts (mixtral, qwen3_moe), latent
# attention with experts in groups (deepseek_v3), sinks with biased and interleaved experts (gpt_oss), partial
# rotations (glm4_moe), learned positions (opt), positions that it counts itself (bart), attention that it writes out
# (falcon) or asks for twice in a layer (diffllama), an indexer (deepseek_v32), a loop over experts (longcat_flash), a
# model that sees images (gemma4).
KINDS = (
    *("gemma3_text", "phi3", "olmo2", "granite", "cohere2", "gpt_neox", "opt", "bart", "falcon", "diffllama"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "deepseek_v32", "longcat_flash", "gemma4"),
)
SPLIT = ("deepseek_v3", "gpt_oss")
REASONS = {
    "mamba": "max_position_embeddings|recurrent state",
    "qwen3_next": "layer_types has linear_attention",
    "doge": "wants a mask of its own",
    "big_bird": "attention_type is block_sparse",
    "openai-gpt": "attention that the model writes out has a product with a tensor",
    "roberta": "other positions than those it is told",
    "musicgen": "has no embedding",
}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    return {kind: save_oracle(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(oracles: dict[str, Oracle], kind: str) -> None:
    check(oracles[kind])


@pytest.mark.parametrize("kind", SPLIT)
def test_two_ranks_give_the_same_tokens(oracles: dict[str, Oracle], kind: str) -> None:
    check(oracles[kind], tensor_parallel_size=2)


def test_each_type_is_served_or_on_a_list() -> None:
    served = {kind for kind in TYPES if kind not in NOT_SMALL and refusal(kind, 1) is None}
    assert served == {*TYPES} - NOT_SMALL - REFUSED - NATIVE
    assert len(served | NATIVE) >= 141
    assert {kind for kind in NOT_SMALL if why_no_tiny_model(kind) is None} == set()
    assert {kind for kind in NATIVE | REFUSED if refusal(kind, 1, "native") is None} == NATIVE


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", sorted({*TYPES} - NOT_SMALL - REFUSED - NATIVE - {*KINDS}))
def test_each_decoder_of_transformers_gives_its_tokens(kind: str, ranks: int, tmp_path: Path) -> None:
    if ranks > 1 and kind in ONE_RANK:
        assert refusal(kind, ranks) is not None
        return
    check(save_oracle(kind, tmp_path), ranks)


def refusal(kind: str, ranks: int, implementation: str = "transformers") -> str | None:
    """Return why a type is not served on so many ranks, None where it is."""
    try:
        config = replace(model_config(kind), implementation=implementation)
        if config.architecture not in FAMILIES and implementation == "native":
            return "no family"
        blueprint(config, ranks)
    except (CheckpointError, ShardingError) as error:
        return str(error)
    return None


SCALED = {"scale_attn_by_inverse_layer_idx": True}  # which our GPT-2 is not


def test_what_a_native_family_does_not_implement_is_served_by_transformers_layers(tmp_path: Path) -> None:
    """With model_impl=auto; who asks for the native family is refused by the field's name."""
    oracle = save_oracle("gpt2", tmp_path, **SCALED)
    check(oracle, model_impl="auto")
    with pytest.raises(CheckpointError, match="scale_attn_by_inverse_layer_idx = True is not supported, only False"):
        LLM(str(tmp_path), model_impl="native", device="cpu")


def test_what_neither_serves_is_refused_with_both_reasons() -> None:
    config = replace(model_config("gpt2", **SCALED), implementation="native", falls_back=True)
    wanted = "inverse_layer_idx = True is not supported, only False; transformers' layers do not serve it either: .*"
    with pytest.raises((CheckpointError, ConfigError, ShardingError), match=wanted):
        blueprint(config, 2)


VARIANTS = {
    "a rope that changes with the length": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        },
        "rope_type 'longrope' .* set max_model_len to 64",
    ),
    "a window of a mask alone": ("phimoe", {"sliding_window": 8}, "window of 8 tokens to a mask alone"),
    "a window of some layers' mask alone": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "window of 8 tokens to a mask alone",
    ),
    "an encoder": ("bert", {"is_decoder": False}, "wants attention that is not causal"),
    "an encoder that writes its attention out": ("rembert", {"is_decoder": False}, "not causal alone"),
    "biases by distance": ("falcon", {"alibi": True}, "writes out has a mask or a bias"),
    "a table of positions that no checkpoint holds": (
        "trocr",
        {"use_learned_position_embeddings": False},
        "other positions than those it is told",
    ),
    "an indexer that leaves tokens out": ("deepseek_v32", {"index_topk": 64}, "set max_model_len to 64"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_would_give_other_tokens_is_refused(variant: str) -> None:
    kind, changes, reason = VARIANTS[variant]
    with pytest.raises(CheckpointError, match=reason):
        blueprint(model_config(kind, **changes))


def test_what_changes_beyond_a_length_is_served_up_to_it() -> None:
    kind, changes, _ = VARIANTS["a rope that changes with the length"]
    assert blueprint(model_config(kind, **changes), max_positions=64).cached
    kind, changes, _ = VARIANTS["a window of a mask alone"]
    assert blueprint(model_config(kind, **changes), max_positions=8).cached
    kind, changes, _ = VARIANTS["an indexer that leaves tokens out"]
    assert blueprint(model_config(kind, **changes), max_positions=64).cached


@pytest.mark.parametrize("changed", ["another head", "a tensor too many", "a tensor too few"])
def test_a_checkpoint_that_is_not_what_its_config_says_is_refused(changed: str, tmp_path: Path) -> None:
    oracle = save_oracle("gemma3_text", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    if changed == "another head":
        tensors["lm_head.weight"] = table + 1
    elif changed == "a tensor too many":
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    else:
        del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    told = {
        "another head": "set tie_word_embeddings to false",
        "a tensor too many": "not part of",
        "a tensor too few": "missing",
    }
    with pytest.raises(CheckpointError, match=told[changed]):
        LLM(str(oracle.folder), model_impl="transformers", num_kv_blocks=8, max_model_len=64)


def test_bfloat16_is_near_transformers(oracles: dict[str, Oracle]) -> None:
    """Routers' biases stay in fp32 there, as transformers keeps them."""
    outline = blueprint(model_config("deepseek_v3"), dtype=torch.bfloat16)
    wide = [name for name, weight in outline.named_parameters() if weight.dtype is torch.float32]
    assert wide
    assert all(name.endswith("e_score_correction_bias") for name in wide)
    oracle = oracles["deepseek_v3"]
    prompt = oracle.prompts[1]
    model = AutoModelForCausalLM.from_pretrained(oracle.folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    settings: dict[str, Any] = {"dtype": "bfloat16", "num_kv_blocks": 8, "max_model_len": 64}
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(str(oracle.folder), model_impl="transformers", device="cpu", **settings) as llm:
        (found,) = llm.generate([prompt], params, use_tqdm=False)
    told = torch.tensor([one.logprob for one in found.prompt_logprobs[1:] if one is not None])
    wanted = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(told, wanted, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("kind", ["phi3", "mixtral"])
def test_bits_do_not_depend_on_the_company(oracles: dict[str, Oracle], kind: str) -> None:
    oracle = oracles[kind]
    settings: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 40, "max_num_batched_tokens": 40}
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    with LLM(
        str(oracle.folder), model_impl="transformers", dtype="float32", enable_prefix_caching=False, **settings
    ) as llm:
        together = [one.outputs[0].logprobs for one in llm.generate(oracle.prompts, params, use_tqdm=False)]
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].logprobs for prompt in oracle.prompts]
    assert together == alone


@pytest.mark.parametrize("kind", REASONS)
def test_what_cannot_be_served_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(CheckpointError, match=REASONS[kind]):
        blueprint(model_config(kind))


def test_chunked_attention_is_served_up_to_a_chunk() -> None:
    long = model_config("llama4_text", max_position_embeddings=16_384)
    with pytest.raises(CheckpointError, match="layer_types has chunked_attention; set max_model_len to 8192"):
        blueprint(long)
    assert len(blueprint(long, max_positions=8192).cached) == long.num_layers


def test_a_model_without_a_plan_is_refused_on_two_ranks() -> None:
    with pytest.raises(
        CheckpointError, match=r"no tensor-parallel plan for OPTForCausalLM; use tensor_parallel_size=1"
    ):
        blueprint(model_config("opt"), size=2)


def test_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises((CheckpointError, ShardingError), match=r"2 ranks|paged cache|divide"):
        blueprint(model_config("gemma2", num_attention_heads=3, num_key_value_heads=3), size=2)


def test_an_unknown_architecture_is_refused() -> None:
    values = tiny_config("qwen3").to_dict() | {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}
    with pytest.raises(CheckpointError, match=r"'NoSuchForCausalLM' is not supported: transformers .* has no such"):
        blueprint(replace(ModelConfig.of(values), implementation="transformers"))


def test_an_unknown_architecture_says_whether_an_upgrade_may_know_it_and_what_it_asks_for() -> None:
    asked = {"layer_types": ["full_attention", "ring_attention"], "transformers_version": "99.1.0"}
    values = {**tiny_config("llama").to_dict(), "model_type": "lama9", "architectures": ["Lama9ForCausalLM"], **asked}
    with pytest.raises(CheckpointError) as caught:
        blueprint(replace(ModelConfig.of(values), implementation="transformers"))
    told = str(caught.value)
    assert "nearest that are known: Llama" in told
    assert "is of transformers 99.1.0: an upgrade of that library may know it" in told
    assert "its layers ask for ring_attention" in told


def test_another_task_of_a_known_type_is_refused() -> None:
    values = tiny_config("qwen3").to_dict() | {"architectures": ["Qwen3ForSequenceClassification"]}
    wanted = r"Qwen3ForSequenceClassification' is not supported: of its model_type .* makes Qwen3ForCausalLM"
    with pytest.raises(CheckpointError, match=wanted):
        blueprint(replace(ModelConfig.of(values), implementation="transformers"))


def test_layers_of_a_device_need_no_other(oracles: dict[str, Oracle]) -> None:
    """The blueprint of a model has no memory."""
    found = blueprint(model_config("mixtral"), dtype=torch.bfloat16)
    assert {weight.device.type for weight in found.parameters()} == {"meta"}
    assert {weight.dtype for weight in found.parameters()} == {torch.bfloat16}


def test_a_class_is_found_as_auto_model_finds_it() -> None:
    """By the type, whatever the case of the architecture; Mistral whose layers have types is Ministral."""
    phi = model_config("phimoe", architectures=["PhiMoEForCausalLM"])
    assert type(blueprint(phi).hf).__name__ == "PhimoeForCausalLM"
    types = ["full_attention", "sliding_attention"]
    mistral = model_config("mistral", layer_types=types, sliding_window=16, head_dim=16)
    for implementation in ("native", "transformers"):
        made = blueprint(replace(mistral, implementation=implementation))
        assert [layer.window for layer in made.attention] == [0, 16]
    with pytest.raises(CheckpointError, match="architecture 'LlamaForSequenceClassification' is not supported"):
        blueprint(model_config("llama", architectures=["LlamaForSequenceClassification"]))


def test_scales_of_an_fp8_cache_are_found_for_every_layer(tmp_path: Path) -> None:
    save_oracle("smollm3", tmp_path)
    file = tmp_path / "model.safetensors"
    scale = torch.tensor(0.5)
    save_file(load_file(file) | {"model.layers.1.self_attn.k_scale": scale}, file)
    model = load_model(open_model(str(tmp_path), impl="transformers"), 64, SoloGroup(), torch.float32)
    found = [None if scales is None else scales[:, 0].tolist() for scales in read_kv_scales(tmp_path, model)]
    assert found == [[1.0, 1.0], [0.5, 1.0]]
