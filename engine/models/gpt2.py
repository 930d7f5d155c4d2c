"""GPT-2: learned positions, LayerNorm, biases everywhere, and linear layers that are stored transposed."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from engine.errors import CheckpointError
from engine.layers.attention import Attention
from engine.layers.base import Build, Conv1D, Names
from engine.layers.embedding import LearnedPositions
from engine.layers.mlp import ACTIVATIONS, MLP
from engine.layers.norm import LayerNorm
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack

# What config.json may say of variants.
ONLY = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


class GPT2(DecoderLM):
    """GPT2LMHeadModel."""

    names: ClassVar[Names] = {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.*.attention_norm": "transformer.h.*.ln_1",
        "layers.*.attention.qkv": Conv1D("transformer.h.*.attn.c_attn"),
        "layers.*.attention.output": Conv1D("transformer.h.*.attn.c_proj"),
        "layers.*.mlp_norm": "transformer.h.*.ln_2",
        "layers.*.mlp.up": Conv1D("transformer.h.*.mlp.c_fc"),
        "layers.*.mlp.down": Conv1D("transformer.h.*.mlp.c_proj"),
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, hidden = config.hf, config.hidden_size
        for name, allowed in ONLY.items():
            hf.refuse(name, allowed)
        heads = hf.integer("n_head", 12)
        if hidden % heads:
            raise CheckpointError(f"config.json: n_embd = {hidden} is not a multiple of n_head = {heads}")
        inner = hf.integer("n_inner", 4 * hidden)
        activation = hf.choice("activation_function", ACTIVATIONS, "gelu_new")
        eps = hf.number("layer_norm_epsilon", 1e-5)
        layers = [
            DecoderLayer(
                LayerNorm(hidden, eps, build),
                Attention(hidden, heads, heads, hidden // heads, build, qkv_bias=True, output_bias=True),
                LayerNorm(hidden, eps, build),
                MLP(hidden, inner, activation, build, bias=True),
            )
            for _ in range(config.num_layers)
        ]
        return Stack(
            layers,
            LayerNorm(hidden, eps, build),
            tied=hf.flag("tie_word_embeddings", True),
            positions=LearnedPositions(config.max_positions, hidden, build),
        )
