"""MiniMax M2: experts are chosen by corrected sigmoids; queries and keys are normed over all heads together."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from engine.layers.base import Build, Names
from engine.layers.mlp import ACTIVATIONS
from engine.layers.moe import MoE, Routing
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.llama import llama_attention
from engine.models.mistral import Mixtral
from engine.models.rope_config import read_rope

HEAD_DIM = 128


class MiniMaxM2(DecoderLM):
    """MiniMaxM2ForCausalLM."""

    names: ClassVar[Names] = {
        **Mixtral.names,
        "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
        "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
        "layers.*.mlp.router.correction": "model.layers.*.block_sparse_moe.e_score_correction_bias",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, hidden = config.hf, config.hidden_size
        eps, size = hf.number("rms_norm_eps", 1e-6), hf.integer("head_dim", HEAD_DIM)
        # Released checkpoints say how many features of a head are rotated, and not their part.
        part = hf.integer("rotary_dim", size) / size
        rotary = Rotary(read_rope(hf, size, build.max_positions, theta=5e6, fraction=part), size, build)
        routing = Routing(
            hf.integer("num_local_experts", 256),
            hf.integer("num_experts_per_tok", 8),
            scores="sigmoid",
            renormalise=True,
            correction=True,
        )
        inner, activation = hf.integer("intermediate_size"), hf.choice("hidden_act", ACTIVATIONS, "silu")
        layers = [
            DecoderLayer(
                RMSNorm(hidden, eps, build),
                llama_attention(config, build, size, rotary=rotary, head_norm_eps=eps, norm_heads=False),
                RMSNorm(hidden, eps, build),
                MoE(hidden, inner, activation, routing, build),
            )
            for _ in range(config.num_layers)
        ]
        return Stack(layers, RMSNorm(hidden, eps, build), tied=hf.flag("tie_word_embeddings"))
