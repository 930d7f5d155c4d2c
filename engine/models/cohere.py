"""Cohere's Command: attention beside the feed-forward, LayerNorm without bias, neighbours are rotated together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from engine.layers.base import Build, Names, Stacked
from engine.layers.norm import LayerNorm
from engine.layers.rope import Rotary
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLM, ParallelLayer, Stack
from engine.models.gemma import layer_types
from engine.models.llama import LLAMA_NAMES, gated_mlp, llama_attention, read_head_dim
from engine.models.rope_config import read_rope


class Cohere(DecoderLM):
    """CohereForCausalLM, Command R: in some a LayerNorm for each head."""

    names: ClassVar[Names] = LLAMA_NAMES | {
        "layers.*.norm": "model.layers.*.input_layernorm",
        "layers.*.attention.q_norm.norms.*": Stacked("model.layers.*.self_attn.q_norm.weight"),
        "layers.*.attention.k_norm.norms.*": Stacked("model.layers.*.self_attn.k_norm.weight"),
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        rotary = cohere_rotary(config, build, theta=5e5)
        return cohere_stack(
            config, build, [rotary] * config.num_layers, window=0, head_norms=config.hf.flag("use_qk_norm")
        )


class Cohere2(DecoderLM):
    """Cohere2ForCausalLM, Command R7B and A: layers of a window are rotated, those that see all are not."""

    names = Cohere.names

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        types = layer_types(config, every=config.hf.integer("sliding_window_pattern", 4))
        rotary = cohere_rotary(config, build, theta=1e4)
        rotaries = [rotary if kind == "sliding_attention" else None for kind in types]
        return cohere_stack(config, build, rotaries, window=config.hf.integer("sliding_window"), head_norms=False)


def cohere_rotary(config: ModelConfig, build: Build, theta: float) -> Rotary:
    """Return the rotation. theta: its base, where config.json names none."""
    size = read_head_dim(config)
    rope = read_rope(config.hf, size, build.max_positions, theta=theta)
    return Rotary(replace(rope, interleaved=True), size, build)


def cohere_stack(
    config: ModelConfig, build: Build, rotaries: Sequence[Rotary | None], *, window: int, head_norms: bool
) -> Stack:
    """Return the layers. rotaries: of each, None = not rotated. window: tokens that those which are rotated see."""
    hf, hidden = config.hf, config.hidden_size
    eps, bias = hf.number("layer_norm_eps", 1e-5), hf.flag("attention_bias")

    def norm() -> LayerNorm:
        return LayerNorm(hidden, eps, build, bias=False)

    layers = [
        ParallelLayer(
            norm(),
            llama_attention(
                config,
                build,
                read_head_dim(config),
                rotary=rotary,
                window=0 if rotary is None else window,
                qkv_bias=bias,
                output_bias=bias,
                head_norm_eps=eps if head_norms else None,
                norm_each=True,
            ),
            gated_mlp(config, build),
        )
        for rotary in rotaries
    ]
    return Stack(
        layers,
        norm(),
        tied=hf.flag("tie_word_embeddings", True),
        logit_divisor=1 / hf.number("logit_scale", 0.0625),
    )
