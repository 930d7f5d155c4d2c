"""Mistral, Ministral, Mixtral: Llama with a sliding window in all layers or some, or queries that grow."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from engine.layers.base import Build, Layer
from engine.layers.mlp import ACTIVATIONS
from engine.layers.moe import MoE, Routing
from engine.layers.rope import QueryScale
from engine.models.config import ModelConfig, positive
from engine.models.decoder import DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, llama_stack
from engine.models.qwen import LAYER_TYPES
from engine.models.rope_config import WHERE, rope_settings

EXPERTS = "model.layers.*.block_sparse_moe.experts.*"


class Mistral(DecoderLM):
    """MistralForCausalLM, and MinistralForCausalLM, whose `layer_types` some files of Mistral have, too."""

    names = LLAMA_NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        window = config.hf.integer("sliding_window", 0, low=0)
        types = config.hf.layer_types(LAYER_TYPES, config.num_layers) or ["sliding_attention"] * config.num_layers
        return llama_stack(config, build, windows=[window * (kind == "sliding_attention") for kind in types])


class Ministral3(DecoderLM):
    """Ministral3ForCausalLM, also Devstral 2: beyond the original context queries grow, as Llama 4's do."""

    names = LLAMA_NAMES
    rope: ClassVar[dict[str, Any]] = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }

    @classmethod
    @override
    def stack(cls, config: ModelConfig, build: Build) -> Stack:
        hf = config.hf
        settings = rope_settings(hf, default=cls.rope)
        beta, original = (
            positive(settings, name, None, WHERE)
            for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
        )
        window = hf.integer("sliding_window", 0, low=0)
        return llama_stack(
            config,
            build,
            128,
            [window] * config.num_layers,
            eps=1e-5,
            rope_default=cls.rope,
            query_scale=QueryScale(beta, original, build, first=0),
        )


class Mixtral(DecoderLM):
    """MixtralForCausalLM: experts in every layer, of which each token passes through two."""

    names = LLAMA_NAMES | {
        "layers.*.mlp.router.linear": "model.layers.*.block_sparse_moe.gate",
        "layers.*.mlp.experts.up.*": (f"{EXPERTS}.w1", f"{EXPERTS}.w3"),
        "layers.*.mlp.experts.down.*": f"{EXPERTS}.w2",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf = config.hf
        routing = Routing(hf.integer("num_local_experts", 8), hf.integer("num_experts_per_tok", 2), renormalise=True)
        inner, activation = hf.integer("intermediate_size"), hf.choice("hidden_act", ACTIVATIONS, "silu")

        def experts(layer: int) -> Layer:
            return MoE(config.hidden_size, inner, activation, routing, build)

        window = hf.integer("sliding_window", 0, low=0)
        return llama_stack(config, build, windows=[window] * config.num_layers, mlp=experts, theta=1e6)
