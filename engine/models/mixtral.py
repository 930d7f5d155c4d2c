"""Mixtral: Mistral with experts in every layer, of which each token passes through two."""

from __future__ import annotations

from typing_extensions import override

from engine.layers.base import Build, Layer
from engine.layers.mlp import ACTIVATIONS
from engine.layers.moe import MoE, Routing
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, llama_stack

EXPERTS = "model.layers.*.block_sparse_moe.experts.*"


class Mixtral(DecoderLM):
    """MixtralForCausalLM."""

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
