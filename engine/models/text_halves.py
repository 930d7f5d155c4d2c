"""Models that read images or sound, too: the config of their text half, and which tensors are that half's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import CheckpointError

# Architectures whose text half gives a text the tokens of the whole model: each is compared with transformers'.
MULTIMODAL = frozenset(
    [
        "AriaForConditionalGeneration",
        "AyaVisionForConditionalGeneration",
        "Cohere2VisionForConditionalGeneration",
        "DeepseekVLForConditionalGeneration",
        "DeepseekVLHybridForConditionalGeneration",
        "Exaone4_5_ForConditionalGeneration",
        "FuyuForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Glm46VForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "GlmAsrForConditionalGeneration",
        "GotOcr2ForConditionalGeneration",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "Idefics2ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "JanusForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
        "Lfm2VlForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "MiniCPMOcrForConditionalGeneration",
        "MiniCPMV4_6ForConditionalGeneration",
        "MiniCPMV4_7ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "MossTranscribeDiarizeForConditionalGeneration",
        "Ovis2ForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ASRForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "VideoLlama3ForConditionalGeneration",
        "VideoLlavaForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
        "VoxtralForConditionalGeneration",
    ]
)
# Types of text halves that compute what another type does. Where a text has no images in it, the three positions of
# each token (time, height, width) are the same, and the rotation is the usual one. With fields that are always so.
SAME_AS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "glm4v_text": ("glm4", {}),
    "glm4v_moe_text": ("glm4_moe", {}),
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {"use_sliding_window": False}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"use_sliding_window": False, "norm_topk_prob": True}),
    "mistral": ("mistral", {"layer_types": None}),
}
# What the first files of Llama 4 say otherwise: 4 for true.
READ_AS = {"attn_temperature_tuning": bool}
# What config.json may say of the text half outside of `text_config`.
OUTER = ("eos_token_id", "dtype", "torch_dtype", "quantization_config")
# Where multimodal models keep their text half; versions of transformers differ.
PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
OTHERS = re.compile(
    r"(?:model\.)?[a-z_]*(?:vision|visual|image|video|audio|speech|modal|projector|connector|merger|aligner|qformer|"
    r"generation|vqmodel)[a-z_0-9]*(?:\.|$)"
)


def text_half(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the config of the text half of a multimodal model, as transformers reads it. name: its architecture.

    Raises `CheckpointError`.
    """
    # With these comes torch, which other models' configs are read without.
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = values.get("text_config", {})  # in files of Qwen2-VL its fields lie beside all others
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config of {name} must be an object, not {text!r}")
    if text:
        coerced = {field: kind(text[field]) for field, kind in READ_AS.items() if field in text}
        values = {**values, "text_config": {**text, **coerced}}
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json: model_type of {name} must be one that transformers knows, not {model_type!r}"
        )
    try:
        whole = CONFIG_MAPPING[model_type].from_dict(dict(values))
        half = whole.get_text_config(decoder=True)
    except Exception as error:  # each class checks its fields in its own way
        told = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"config.json: transformers cannot read that of {name}: {told}") from error
    kind, always = SAME_AS.get(half.model_type, (half.model_type, {}))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CheckpointError(f"config.json: the text half of {name} is {kind!r}, which is not supported")
    said = {field: values[field] for field in OUTER if values.get(field) is not None and text.get(field) is None}
    # A family has a width of its own where a config is silent.
    if getattr(half, "num_attention_heads", 0) and "head_dim" not in half.to_dict():
        said["head_dim"] = half.hidden_size // half.num_attention_heads
    said["tie_word_embeddings"] = whole.tie_word_embeddings  # whatever the half says of itself
    architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    return {**half.to_dict(), **said, **always, "model_type": kind, "architectures": architectures}


def text_names(names: Iterable[str]) -> tuple[dict[str, str], int]:
    """Return what the text half calls its tensors -> name on disk, and how many are of other parts.

    Raises `CheckpointError` for a tensor that is there under two names.
    """
    found: dict[str, str] = {}
    apart = 0
    for name in names:
        prefix, plain = next((one for one in PREFIXES if name.startswith(one[0])), ("", ""))
        if not prefix and OTHERS.match(name):
            apart += 1
            continue
        new = plain + name.removeprefix(prefix)
        if new in found:
            raise CheckpointError(f"the checkpoint holds {new} twice: {found[new]} and {name}")
        found[new] = name
    return found, apart
