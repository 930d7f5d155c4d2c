"""Granite 3 and 4, dense: Llama with a number by which each of its parts is multiplied."""

from __future__ import annotations

from typing_extensions import override

from engine.layers.base import Build
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, gated_mlp, llama_attention, read_head_dim
from engine.models.rope_config import read_rope


class Granite(DecoderLM):
    """GraniteForCausalLM."""

    names = LLAMA_NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, hidden, size = config.hf, config.hidden_size, read_head_dim(config)
        eps, bias = hf.number("rms_norm_eps", 1e-6), hf.flag("attention_bias")
        rotary = Rotary(read_rope(hf, size, build.max_positions), size, build)
        layers = [
            DecoderLayer(
                RMSNorm(hidden, eps, build),
                llama_attention(
                    config,
                    build,
                    size,
                    rotary=rotary,
                    qkv_bias=bias,
                    output_bias=bias,
                    scale=hf.number("attention_multiplier", 1.0),
                ),
                RMSNorm(hidden, eps, build),
                gated_mlp(config, build, bias=hf.flag("mlp_bias")),
                scale=hf.number("residual_multiplier", 1.0),
            )
            for _ in range(config.num_layers)
        ]
        return Stack(
            layers,
            RMSNorm(hidden, eps, build),
            tied=hf.flag("tie_word_embeddings"),
            embedding_scale=hf.number("embedding_multiplier", 1.0),
            logit_divisor=hf.number("logits_scaling", 1.0),
        )
