"""Models that see images, too: their text half is served, and gives the tokens that the whole model gives a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.llm import LLM
from engine.loader.checkpoint import open_model
from engine.sampling_params import SamplingParams
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests import tiny_tokenizer
from tests.parity.stepping import Stepper
from tests.parity.tiny_models import CONFIGS, RECURRENT, check_against, oracle_logits, prompts

GEMMA = {"image_size": 28, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
EYES = GEMMA | {"num_attention_heads": 2}


def whole(kind: str) -> transformers.PreTrainedModel:
    """Return a small random model that sees images."""
    torch.manual_seed(0)
    if kind == "gemma3":
        text = CONFIGS["gemma3"]().to_dict()
        config = transformers.Gemma3Config(text_config=text, vision_config=EYES, mm_tokens_per_image=4)
        return transformers.Gemma3ForConditionalGeneration(config).eval()
    if kind == "qwen3_5":
        sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        text = RECURRENT["qwen3_5"]().to_dict()
        return transformers.Qwen3_5ForConditionalGeneration(
            transformers.Qwen3_5Config(text_config=text, vision_config=sizes, tie_word_embeddings=True)
        ).eval()
    text = CONFIGS["mistral"]().to_dict()
    config = transformers.Mistral3Config(
        text_config=text, vision_config={"model_type": "pixtral", **EYES}, tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config).eval()


def saved(kind: str, folder: Path, prefix: str) -> transformers.PreTrainedModel:
    """Save a model with its text half under `prefix`, as versions of transformers do."""
    model = whole(kind)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    half = "language_model.model." if any(name.startswith("language_model.model.") for name in tensors) else ""
    renamed = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("language_model.").removeprefix("model.language_model.")
        text = name.startswith(("language_model.", "model.language_model."))
        renamed[prefix + plain.removeprefix("model.") if text and not plain.startswith("lm_head") else name] = tensor
    assert half or prefix
    save_file(renamed, file)
    return model


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_a_text_half_gives_the_tokens_of_the_whole(kind: str, prefix: str, tmp_path: Path) -> None:
    model = saved(kind, tmp_path, prefix)
    config = EngineConfig(str(tmp_path), num_kv_blocks=200, block_size=4, device="cpu", dtype="float32")
    ragged = prompts(4)
    check_against(model, Stepper(ModelRunner(config, SoloGroup())).generate(ragged, 5), ragged)
    assert open_model(str(tmp_path)).config.text_half_of == type(model).__name__


def test_a_text_half_with_a_recurrent_state_gives_the_tokens_of_the_whole(tmp_path: Path) -> None:
    model = saved("qwen3_5", tmp_path, "model.language_model.")
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path)
    ragged, greedy = prompts(4), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", dtype="float32", num_kv_blocks=90, block_size=4, max_num_seqs=4) as llm:
        found = llm.generate(ragged, greedy)
    for prompt, result in zip(ragged, found, strict=True):
        tokens = list(result.outputs[0].token_ids)
        logits = oracle_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert (logits.max(dim=-1).values - logits[range(len(tokens)), tokens]).max() < 2e-4


def test_another_tensor_is_still_refused(tmp_path: Path) -> None:
    saved("mistral3", tmp_path, "model.language_model.")
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.ear.weight": torch.zeros(2)}, file)
    config = EngineConfig(str(tmp_path), num_kv_blocks=20, device="cpu")
    with pytest.raises(CheckpointError, match=r"not part of this architecture: model\.ear\.weight"):
        ModelRunner(config, SoloGroup())


def test_a_config_without_its_text_half_is_refused(tmp_path: Path) -> None:
    saved("mistral3", tmp_path, "model.language_model.")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text_config": 3}))
    with pytest.raises(CheckpointError, match="text_config of Mistral3ForConditionalGeneration must be an object"):
        open_model(str(tmp_path))
