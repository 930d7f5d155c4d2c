"""Which architectures this engine serves: name in config.json -> the family that builds it.

Needs no torch: a family is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from engine.errors import CheckpointError

FAMILIES: Mapping[str, str] = {
    "CohereForCausalLM": "engine.models.cohere.Cohere",
    "Cohere2ForCausalLM": "engine.models.cohere.Cohere2",
    "DeepseekV2ForCausalLM": "engine.models.deepseek.DeepseekV2",
    "DeepseekV3ForCausalLM": "engine.models.deepseek.DeepseekV3",
    "GPT2LMHeadModel": "engine.models.gpt2.GPT2",
    "Gemma2ForCausalLM": "engine.models.gemma.Gemma2",
    "Gemma3ForCausalLM": "engine.models.gemma.Gemma3",
    "Glm4ForCausalLM": "engine.models.glm.Glm4",
    "Glm4MoeForCausalLM": "engine.models.glm.Glm4Moe",
    "Glm4MoeLiteForCausalLM": "engine.models.deepseek.Glm4MoeLite",
    "GptOssForCausalLM": "engine.models.gpt_oss.GptOss",
    "GraniteForCausalLM": "engine.models.granite.Granite",
    "GraniteMoeForCausalLM": "engine.models.granite_moe.GraniteMoe",
    "GraniteMoeHybridForCausalLM": "engine.models.granite_moe.GraniteHybrid",
    "GraniteMoeSharedForCausalLM": "engine.models.granite_moe.GraniteMoeShared",
    "Lfm2ForCausalLM": "engine.models.lfm2.Lfm2",
    "Lfm2MoeForCausalLM": "engine.models.lfm2.Lfm2Moe",
    "LlamaForCausalLM": "engine.models.llama.Llama",
    "Llama4ForCausalLM": "engine.models.llama4.Llama4",
    "MiniMaxM2ForCausalLM": "engine.models.minimax.MiniMaxM2",
    "MinistralForCausalLM": "engine.models.mistral.Mistral",
    "Ministral3ForCausalLM": "engine.models.mistral.Ministral3",
    "MistralForCausalLM": "engine.models.mistral.Mistral",
    "MixtralForCausalLM": "engine.models.mistral.Mixtral",
    "NemotronHForCausalLM": "engine.models.nemotron_h.NemotronH",
    "Olmo2ForCausalLM": "engine.models.olmo.Olmo2",
    "Olmo3ForCausalLM": "engine.models.olmo.Olmo3",
    "Phi3ForCausalLM": "engine.models.phi.Phi3",
    "Qwen2ForCausalLM": "engine.models.qwen.Qwen2",
    "Qwen3ForCausalLM": "engine.models.qwen.Qwen3",
    "Qwen2MoeForCausalLM": "engine.models.qwen_moe.Qwen2Moe",
    "Qwen3MoeForCausalLM": "engine.models.qwen_moe.Qwen3Moe",
    "Qwen3NextForCausalLM": "engine.models.qwen3_next.Qwen3Next",
    "Qwen3_5ForCausalLM": "engine.models.qwen3_next.Qwen35",
    "Qwen3_5MoeForCausalLM": "engine.models.qwen3_next.Qwen35Moe",
    "StableLmForCausalLM": "engine.models.stablelm.StableLm",
}

TRANSFORMERS = "engine.models.transformers.model.TransformersModel"


def implementation(architecture: str, asked: str = "auto") -> str:
    """Return who builds an architecture, "native" or "transformers". asked: of these, or "auto".

    Raises `CheckpointError` where `asked` is "native" and there is no family. Whether transformers has the
    architecture, and whether it can be served, is found out when the model is built.
    """
    if asked == "native" and architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(
            f"config.json: architecture {architecture!r} has no native family; known: {known}; "
            "use model_impl=transformers"
        )
    return "native" if architecture in FAMILIES and asked != "transformers" else "transformers"


def family_of(architecture: str, implementation: str) -> Any:
    """Return the class that builds an architecture, a `CausalLM`. implementation: "native" or "transformers"."""
    found = FAMILIES[architecture] if implementation == "native" else TRANSFORMERS
    module, _, name = found.rpartition(".")
    return getattr(import_module(module), name)
