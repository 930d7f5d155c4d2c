"""Gemma 2 and 3: norms before and after, weights of norms around 0, sliding windows in most layers, capped scores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import override

from engine.layers.attention import Attention
from engine.layers.base import Build
from engine.layers.norm import RMSNorm
from engine.layers.rope import RopeSpec, Rotary
from engine.models.config import HFConfig, ModelConfig
from engine.models.decoder import DecoderLM, NormedTwiceLayer, Stack
from engine.models.llama import LLAMA_NAMES, gated_mlp, llama_attention
from engine.models.qwen import LAYER_TYPES
from engine.models.rope_config import is_nested, read_rope

GEMMA_NAMES = LLAMA_NAMES | {
    "layers.*.after_attention": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.after_mlp": "model.layers.*.post_feedforward_layernorm",
}


class Gemma2(DecoderLM):
    """Gemma2ForCausalLM: every second layer sees a window; scores and logits are capped."""

    names = GEMMA_NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        types = layer_types(config, every=2)
        rotary = Rotary(read_rope(config.hf, head_dim(config.hf), build.max_positions), head_dim(config.hf), build)
        rotaries = dict.fromkeys(LAYER_TYPES, rotary)
        return gemma_stack(config, build, types, rotaries, head_norms=False)


class Gemma3(DecoderLM):
    """Gemma3ForCausalLM: five of six layers see a window and turn faster; queries and keys are normed."""

    names = GEMMA_NAMES | {
        "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
        "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, size = config.hf, head_dim(config.hf)
        types = layer_types(config, every=hf.integer("sliding_window_pattern", 6))
        rotaries = {kind: Rotary(gemma3_rope(hf, size, build, kind), size, build) for kind in LAYER_TYPES}
        return gemma_stack(config, build, types, rotaries, head_norms=True)


def gemma_stack(
    config: ModelConfig,
    build: Build,
    types: tuple[str, ...],
    rotaries: Mapping[str, Rotary],
    *,
    head_norms: bool,
) -> Stack:
    """Return the layers of Gemma."""
    hf, hidden = config.hf, config.hidden_size
    hf.refuse("use_bidirectional_attention", False)
    eps, bias = hf.number("rms_norm_eps", 1e-6), hf.flag("attention_bias")
    softcap = cap_of(hf, "attn_logit_softcapping")
    window = hf.integer("sliding_window", 4096)

    def norm() -> RMSNorm:
        return RMSNorm(hidden, eps, build, offset=1.0)

    def attention(kind: str) -> Attention:
        return llama_attention(
            config,
            build,
            head_dim(hf),
            rotary=rotaries[kind],
            window=window if kind == "sliding_attention" else 0,
            qkv_bias=bias,
            output_bias=bias,
            head_norm_eps=eps if head_norms else None,
            norm_offset=1.0,
            scale=hf.number("query_pre_attn_scalar", 256) ** -0.5,
            softcap=softcap,
        )

    layers = [
        NormedTwiceLayer(
            norm(), attention(kind), norm(), norm(), gated_mlp(config, build, activation="hidden_activation"), norm()
        )
        for kind in types
    ]
    return Stack(
        layers,
        norm(),
        tied=hf.flag("tie_word_embeddings", True),
        softcap=cap_of(hf, "final_logit_softcapping"),
        # As the embeddings themselves it is of the model's dtype.
        embedding_scale=torch.tensor(hidden**0.5, dtype=build.dtype, device="cpu").item(),
    )


def head_dim(hf: HFConfig) -> int:
    """Return the size of a head, 256 where config.json says nothing."""
    return hf.integer("head_dim", 256)


def layer_types(config: ModelConfig, every: int) -> tuple[str, ...]:
    """Return what each layer is. every: distance of the layers that see all, where `layer_types` says nothing."""
    types = config.hf.layer_types(LAYER_TYPES, config.num_layers)
    return types or tuple(LAYER_TYPES[bool((layer + 1) % every)] for layer in range(config.num_layers))


def gemma3_rope(hf: HFConfig, size: int, build: Build, kind: str) -> RopeSpec:
    """Return how layers of a kind turn; `rope_local_base_freq` is an older name of the base of those of a window."""
    if kind == "full_attention" or is_nested(hf):
        theta = 1e6 if kind == "full_attention" else 1e4
        return read_rope(hf, size, build.max_positions, kind, theta=theta)
    return RopeSpec(hf.number("rope_local_base_freq", 1e4))


def cap_of(hf: HFConfig, name: str) -> float:
    """Return a cap of scores or logits, 0 where there is none."""
    return hf.number(name) if hf.get(name) is not None else 0.0
