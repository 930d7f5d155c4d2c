"""GLM-4, dense and with experts (4.5 to 4.7): half of each head is rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from engine.layers.base import Build, Names
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, NormedTwiceLayer, Stack
from engine.models.deepseek import SHARED_NAMES, DeepseekV3, Defaults, corrected_routing, shared_experts_mlp
from engine.models.llama import LLAMA_NAMES, gated_mlp, llama_attention, read_head_dim
from engine.models.qwen import Qwen3
from engine.models.qwen_moe import MOE_NAMES
from engine.models.rope_config import read_rope

ROTATED = 0.5  # part of a head, where config.json says nothing


class Glm4(DecoderLM):
    """Glm4ForCausalLM: norms before and after, neighbours are rotated together."""

    names: ClassVar[Names] = LLAMA_NAMES | {
        "layers.*.after_attention": "model.layers.*.post_self_attn_layernorm",
        "layers.*.after_mlp": "model.layers.*.post_mlp_layernorm",
        "layers.*.mlp.up": "model.layers.*.mlp.gate_up_proj",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, hidden, size = config.hf, config.hidden_size, config.hf.integer("head_dim", 128)
        eps = hf.number("rms_norm_eps", 1.5625e-7)
        rope = replace(read_rope(hf, size, build.max_positions, fraction=ROTATED), interleaved=True)
        rotary = Rotary(rope, size, build)
        layers = [
            NormedTwiceLayer(
                RMSNorm(hidden, eps, build),
                llama_attention(config, build, size, rotary=rotary, qkv_bias=hf.flag("attention_bias", True)),
                RMSNorm(hidden, eps, build),
                RMSNorm(hidden, eps, build),
                gated_mlp(config, build),
                RMSNorm(hidden, eps, build),
            )
            for _ in range(config.num_layers)
        ]
        return Stack(layers, RMSNorm(hidden, eps, build), tied=hf.flag("tie_word_embeddings"))


class Glm4Moe(DecoderLM):
    """Glm4MoeForCausalLM: experts as in DeepSeek-V3, attention as in Qwen 3."""

    names: ClassVar[Names] = Qwen3.names | MOE_NAMES | SHARED_NAMES
    defaults: ClassVar[Defaults] = Defaults(128, 8, 1408, 1, 1, 1.0)

    @classmethod
    @override
    def stack(cls, config: ModelConfig, build: Build) -> Stack:
        hf, hidden, size = config.hf, config.hidden_size, read_head_dim(config)
        eps = hf.number("rms_norm_eps", 1e-5)
        rotary = Rotary(read_rope(hf, size, build.max_positions, fraction=ROTATED), size, build)
        routing = corrected_routing(hf, cls.defaults)
        layers = [
            DecoderLayer(
                RMSNorm(hidden, eps, build),
                llama_attention(
                    config,
                    build,
                    size,
                    rotary=rotary,
                    qkv_bias=hf.flag("attention_bias"),
                    head_norm_eps=eps if hf.flag("use_qk_norm") else None,
                ),
                RMSNorm(hidden, eps, build),
                shared_experts_mlp(config, build, routing, cls.defaults, layer),
            )
            for layer in range(config.num_layers)
        ]
        return Stack(layers, RMSNorm(hidden, eps, build), tied=hf.flag("tie_word_embeddings"))

    @classmethod
    @override
    def is_unused(cls, config: ModelConfig, layer: int) -> bool:
        return DeepseekV3.is_unused(config, layer)
