"""Tiny random models that read images or sound, too, of every kind whose text half is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from engine.models.text_halves import MULTIMODAL, SAME_AS
from tests.parity.census import MORE, shrunk

# Of type names that share an architecture the first is built.
KINDS: dict[str, str] = {}
for _type, _architecture in sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()):
    if _architecture in MULTIMODAL:
        KINDS.setdefault(_architecture, _type)
# Whatever of these the config of another part has is made small.
EYES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "projection_dim", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "intermediate_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "num_key_value_heads"), 2),
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "head_dim": 16,
    "num_mel_bins": 16,
}
# Positions of a token in time, height and width turn so many pairs of features each.
QWEN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
# Of sizes that tell the two ways apart in which experts are stored.
SIZES: dict[str, dict[str, Any]] = {"qwen3_vl_moe_text": {"moe_intermediate_size": 24}}
GLM: dict[str, Any] = QWEN | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
SECTIONS = {"qwen2_vl_text": QWEN, "qwen2_5_vl_text": QWEN, "glm4v_text": GLM, "glm4v_moe_text": GLM}


def tiny_multimodal(model_type: str) -> PreTrainedModel:
    """Return a random model of a type."""
    default = AutoConfig.for_model(model_type)
    text = default.get_text_config(decoder=True)
    parts: dict[str, Any] = {}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is text:
            parts[name] = _small_text(text)
        elif part is not None:
            said = part.to_dict()
            parts[name] = said | {field: size for field, size in EYES.items() if said.get(field) is not None}
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(type(default)(**parts), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            near = 1.0 if parameter.ndim == 1 and "norm" in name and "bias" not in name else 0.0
            parameter.normal_(near, 0.1)
    return model


def _small_text(text: PreTrainedConfig) -> dict[str, Any]:
    kind, _ = SAME_AS.get(text.model_type, (text.model_type, {}))
    more = MORE.get(kind, {}) | SIZES.get(text.model_type, {}) | {"model_type": text.model_type}
    small = text.to_dict() | shrunk(text) | more
    if text.model_type in SECTIONS:
        small["rope_parameters"] = SECTIONS[text.model_type]
    # Fields of layers and tokens that are not there any more.
    return {name: value for name, value in small.items() if name not in ("per_layer_config", "pad_token_id")}


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return tokens that are computed from the whole text each time, without a cache."""
    text = list(prompt)
    for _ in range(count):
        ids = torch.tensor([text])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1]
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """Return the log probabilities of a prompt's tokens after its first, [len(prompt) - 1]."""
    ids = torch.tensor([prompt])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
