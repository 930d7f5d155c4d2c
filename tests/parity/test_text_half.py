"""Models that read images or sound, too: their text half gives a text the tokens of the whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.llm import LLM
from engine.loader.checkpoint import open_model
from engine.models.blueprint import blueprint
from engine.models.config import ModelConfig
from engine.models.text_halves import MULTIMODAL
from engine.sampling_params import SamplingParams
from tests import tiny_tokenizer
from tests.parity.tiny_models import prompts
from tests.parity.tiny_multimodal import KINDS, greedy, logprobs_of, tiny_multimodal

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 8


# In transformers 5.23 these leave out the factor of the logits with which their text halves were trained, and serve
# by themselves: greedy tokens are the same, probabilities are not.
UNSCALED = ("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration")


def opened(folder: Path) -> LLM:
    sizes = {"max_model_len": 128, "num_kv_blocks": 9, "max_num_batched_tokens": 24}
    return LLM(str(folder), device="cpu", dtype="float32", **sizes)


def generated(llm: LLM, ragged: list[list[int]]) -> list[list[int]]:
    found = llm.generate(ragged, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


def served(folder: Path, ragged: list[list[int]]) -> list[list[int]]:
    with opened(folder) as llm:
        return generated(llm, ragged)


def saved(kind: str, folder: Path) -> transformers.PreTrainedModel:
    model = tiny_multimodal(kind)
    model.save_pretrained(folder)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)
    return model


def edit_names(folder: Path, pattern: str, replacement: str) -> None:
    """Rename the tensors of a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file)


def test_every_architecture_of_the_list_is_compared() -> None:
    assert KINDS.keys() == MULTIMODAL


@pytest.mark.parametrize("architecture", sorted(MULTIMODAL))
def test_a_text_half_gives_the_tokens_of_the_whole(architecture: str, tmp_path: Path) -> None:
    model = saved(KINDS[architecture], tmp_path)
    if architecture == "Kimi_K25ForConditionalGeneration":
        # transformers 5.23 saves these layers under the name that those of its vision have; released files do not.
        edit_names(tmp_path, r"^(language_model\.model\.)blocks", r"\1layers")
    ragged = prompts(3)
    with opened(tmp_path) as llm:
        assert generated(llm, ragged) == [greedy(model, prompt, TOKENS) for prompt in ragged]
        scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        told = [one.prompt_logprobs for one in llm.generate(ragged, scored, use_tqdm=False)]
    if architecture not in UNSCALED:
        for prompt, logprobs in zip(ragged, told, strict=True):
            found = torch.tensor([token.logprob for token in logprobs[1:]])
            torch.testing.assert_close(found, logprobs_of(model, prompt), rtol=1e-4, atol=1e-4)
    assert open_model(str(tmp_path)).config.text_half_of == architecture


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_versions_of_transformers_put_it_under_their_own_prefixes(kind: str, prefix: str, tmp_path: Path) -> None:
    model = saved(kind, tmp_path)
    edit_names(tmp_path, r"^(model\.language_model|language_model\.model)\.", "text.")
    edit_names(tmp_path, r"^text\.", prefix)
    ragged = prompts(3)
    assert served(tmp_path, ragged) == [greedy(model, prompt, TOKENS) for prompt in ragged]


@pytest.mark.parametrize("said", [True, False, None])
def test_the_files_say_whether_the_head_is_the_embedding(said: bool | None, tmp_path: Path) -> None:
    """Configs say it now of the whole, now of its half, or not at all, as Mistral Small 3.1's."""
    model = saved("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    head = torch.randn_like(model.get_output_embeddings().weight)
    save_file(load_file(file) | {"language_model.lm_head.weight": head}, file)
    values = json.loads((tmp_path / "config.json").read_text())
    for part in (values, values["text_config"]):
        part.pop("tie_word_embeddings", None)
        if said is not None:
            part["tie_word_embeddings"] = said
    (tmp_path / "config.json").write_text(json.dumps(values))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head)
    ragged = prompts(3)
    assert served(tmp_path, ragged) == [greedy(model, prompt, TOKENS) for prompt in ragged]


def test_a_config_with_all_fields_side_by_side_is_read() -> None:
    """As those of Qwen2-VL and Qwen2.5-VL were released."""
    config = ModelConfig.of(
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 320,
            "rope_theta": 5e5,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "max_position_embeddings": 4096,
            "eos_token_id": 7,
            "torch_dtype": "bfloat16",
            "vision_config": {"depth": 32},
        }
    )
    assert (config.architecture, config.num_layers, config.max_positions) == ("Qwen2ForCausalLM", 3, 4096)
    assert (config.eos_token_ids, config.dtype) == ((7,), "bfloat16")
    assert config.hf.get("rope_parameters")["rope_theta"] == 5e5


def test_experts_may_lie_the_other_way_round(tmp_path: Path) -> None:
    """As those of Qwen3-VL are released: [experts, in, out]."""
    model = saved("qwen3_vl_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(turned, file)
    ragged = prompts(3)
    assert served(tmp_path, ragged) == [greedy(model, prompt, TOKENS) for prompt in ragged]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3_vl", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("mistral3", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
        ("llava", {"partial_rotary_factor": 0.5}),
    ],
)
def test_fields_that_the_whole_does_not_read_change_nothing(
    kind: str, more: dict[str, object], tmp_path: Path
) -> None:
    saved(kind, tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"text_config": values["text_config"] | more}))
    model = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ragged = prompts(3)
    assert served(tmp_path, ragged) == [greedy(model, prompt, TOKENS) for prompt in ragged]


def test_llama_4s_first_files_are_read(tmp_path: Path) -> None:
    saved("llama4", tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"text_config": values["text_config"] | {"attn_temperature_tuning": 4}}))
    assert open_model(str(tmp_path)).config.hf.get("attn_temperature_tuning") is True


LAYER = "model.layers.0"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("lists", "plain"),
    [
        (
            {"ignore": ["model.language_model.layers.0.mlp.down_proj", "language_model.lm_head", "vision_tower.x"]},
            {f"{LAYER}.mlp.down_proj", "lm_head"},
        ),
        ({"ignore": [f"{LAYER}.mlp.down_proj", "re:vision_tower.*"]}, {f"{LAYER}.mlp.down_proj"}),
        (
            {"ignore": ["re:^language_model\\.model\\.layers\\.0\\.mlp.*"]},
            {f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj"},
        ),
        ({"ignore": ["model.language_model.layers.*.self_attn"]}, {f"{LAYER}.self_attn.q_proj"}),
        (
            {"targets": ["re:model.language_model.layers.*proj"], "ignore": ["re:.*self_attn.*"]},
            {f"{LAYER}.self_attn.q_proj", "lm_head"},
        ),
    ],
    ids=["names", "of the half", "expression", "pattern", "targets"],
)
def test_lists_of_a_quantised_checkpoint_may_name_modules_as_the_whole_does(
    tmp_path: Path, lists: dict[str, list[str]], plain: set[str], nested: bool
) -> None:
    saved("mistral3", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    scheme = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}
    found = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": lists.get("targets", ["Linear"]), "weights": scheme}},
        "ignore": lists["ignore"],
    }
    (values["text_config"] if nested else values)["quantization_config"] = found
    spec = ModelConfig.of(values).quantization
    assert spec is not None
    names = [f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.q_proj", "lm_head"]
    assert {name for name in names if spec.of(name) is None} == plain


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    saved("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("language_model.model.layers.0.self_attn.q_proj"))
    save_file(tensors | {name.removeprefix("language_model."): tensors[name].clone()}, file)
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.weight twice"):
        served(tmp_path, prompts(1))


def test_another_tensor_is_still_refused(tmp_path: Path) -> None:
    saved("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.ear.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"not part of this architecture: model\.ear\.weight"):
        served(tmp_path, prompts(1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_config": 3}, "text_config of Mistral3ForConditionalGeneration must be an object"),
        ({"model_type": "mistral33"}, "model_type of Mistral3ForConditionalGeneration must be one that transformers"),
        ({"text_config": {"hidden_size": "x"}}, "transformers cannot read that of Mistral3.*hidden_size"),
        ({"text_config": {"model_type": "clip_text_model"}}, "text half of Mistral3.* is 'clip_text_model'"),
    ],
)
def test_a_config_without_its_text_half_is_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    saved("mistral3", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=said):
        open_model(str(tmp_path))


def test_an_unknown_whole_is_refused_with_the_nearest(tmp_path: Path) -> None:
    saved("qwen2_5_vl", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    said = "'Qwen9VLForConditionalGeneration' is not supported: it has a text_config.*nearest: Qwen3VL"
    with pytest.raises(CheckpointError, match=said):
        ModelConfig.of(values | {"architectures": ["Qwen9VLForConditionalGeneration"]})


def test_a_model_whose_text_half_was_not_compared_is_refused_by_name(tmp_path: Path) -> None:
    values = {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma", "vocab_size": 320}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(values | sizes))
    with pytest.raises(CheckpointError, match="architecture 'PaliGemmaForConditionalGeneration' is not supported"):
        blueprint(open_model(str(tmp_path)).config)
