"""Qwen3-Next and Qwen3.5: a gated delta net in three of four layers, gated attention in the fourth.

All layers of Qwen3-Next and of Qwen3.5-MoE have experts, those of Qwen3.5 have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from typing_extensions import override

from engine.layers.base import Build, Layer, Names
from engine.layers.norm import RMSNorm
from engine.layers.recurrent import DeltaSizes, GatedDeltaNet
from engine.layers.rope import Rotary
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.llama import gated_mlp, llama_attention
from engine.models.qwen_moe import Qwen2Moe, qwen_mlp
from engine.models.rope_config import read_rope

KINDS = ("linear_attention", "full_attention")
NET = "model.layers.*.linear_attn"
ROTATED = 0.25  # part of a head, where config.json says nothing
NET_NAMES: Names = {
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.attention.conv": f"{NET}.conv1d",
    "layers.*.attention.decay_log": f"{NET}.A_log",
    "layers.*.attention.time_bias": f"{NET}.dt_bias",
    "layers.*.attention.norm": f"{NET}.norm",
    "layers.*.attention.result": f"{NET}.out_proj",
}


class Qwen3Next(DecoderLM):
    """Qwen3NextForCausalLM."""

    names: ClassVar[Names] = {
        **Qwen2Moe.names,
        **NET_NAMES,
        "layers.*.attention.input": f"{NET}.in_proj_qkvz",
        "layers.*.attention.rates": f"{NET}.in_proj_ba",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        return net_stack(config, build, experts(config, build), by_head=True)


class Qwen35Moe(DecoderLM):
    """Qwen3_5MoeForCausalLM."""

    names: ClassVar[Names] = {
        **Qwen2Moe.names,
        **NET_NAMES,
        "layers.*.attention.input": f"{NET}.in_proj_qkv",
        "layers.*.attention.gate": f"{NET}.in_proj_z",
        "layers.*.attention.rates": (f"{NET}.in_proj_b", f"{NET}.in_proj_a"),
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        return net_stack(config, build, experts(config, build), by_head=False)


class Qwen35(DecoderLM):
    """Qwen3_5ForCausalLM."""

    names = Qwen35Moe.names

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        return net_stack(config, build, lambda _: gated_mlp(config, build), by_head=False)


def experts(config: ModelConfig, build: Build) -> Callable[[int], Layer]:
    """Return what makes the feed-forward of a layer: experts, and one that all tokens pass through."""
    shared = config.hf.integer("shared_expert_intermediate_size", 512)
    return qwen_mlp(config, build, shared_inner=shared, renormalise=True)


def net_stack(config: ModelConfig, build: Build, mlp: Callable[[int], Layer], *, by_head: bool) -> Stack:
    """Return the layers. mlp: makes the feed-forward of the layer of a number. by_head: as of `GatedDeltaNet`."""
    hf, hidden, size = config.hf, config.hidden_size, config.hf.integer("head_dim", 256)
    eps, bias = hf.number("rms_norm_eps", 1e-6), hf.flag("attention_bias")
    hf.choice("hidden_act", ("silu",), "silu")
    rotary = Rotary(read_rope(hf, size, build.max_positions, fraction=ROTATED), size, build)
    sizes = DeltaSizes(
        hf.integer("linear_num_key_heads", 16),
        hf.integer("linear_num_value_heads", 32),
        hf.integer("linear_key_head_dim", 128),
        hf.integer("linear_value_head_dim", 128),
    )
    taps = hf.integer("linear_conv_kernel_dim", 4)
    every = hf.integer("full_attention_interval", 4)
    kinds = hf.layer_types(KINDS, config.num_layers)
    kinds = kinds or tuple(KINDS[(layer + 1) % every == 0] for layer in range(config.num_layers))

    def norm() -> RMSNorm:
        return RMSNorm(hidden, eps, build, offset=1.0)

    def mixer(kind: str) -> Layer:
        if kind == "linear_attention":
            return GatedDeltaNet(hidden, sizes, taps, eps, build, by_head=by_head)
        return llama_attention(
            config,
            build,
            size,
            rotary=rotary,
            qkv_bias=bias,
            output_bias=bias,
            head_norm_eps=eps,
            norm_offset=1.0,
            gated=True,
        )

    layers = [DecoderLayer(norm(), mixer(kind), norm(), mlp(layer)) for layer, kind in enumerate(kinds)]
    return Stack(layers, norm(), tied=hf.flag("tie_word_embeddings"))
