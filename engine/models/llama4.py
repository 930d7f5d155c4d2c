"""Llama 4, text: attention within chunks in most layers, no rotation in the others, and one expert for a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from engine.errors import CheckpointError
from engine.layers.base import Build, Layer, Names, StackedConv1D
from engine.layers.mlp import ACTIVATIONS, GatedMLP
from engine.layers.moe import MoE, Routing
from engine.layers.norm import RMSNorm
from engine.layers.rope import QueryScale, Rotary
from engine.models.config import HFConfig, ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, llama_attention
from engine.models.rope_config import read_rope

MLP = "model.layers.*.feed_forward"
CHUNKED, FULL = "chunked_attention", "full_attention"


class Llama4(DecoderLM):
    """Llama4ForCausalLM."""

    names: ClassVar[Names] = LLAMA_NAMES | {
        "layers.*.mlp.up": (f"{MLP}.gate_proj", f"{MLP}.up_proj"),
        "layers.*.mlp.down": f"{MLP}.down_proj",
        "layers.*.mlp.router.linear": f"{MLP}.router",
        "layers.*.mlp.shared.up": (f"{MLP}.shared_expert.gate_proj", f"{MLP}.shared_expert.up_proj"),
        "layers.*.mlp.shared.down": f"{MLP}.shared_expert.down_proj",
        "layers.*.mlp.experts.up.*": StackedConv1D(f"{MLP}.experts.gate_up_proj"),
        "layers.*.mlp.experts.down.*": StackedConv1D(f"{MLP}.experts.down_proj"),
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, hidden, size = config.hf, config.hidden_size, config.hf.integer("head_dim", 128)
        eps, bias = hf.number("rms_norm_eps", 1e-5), hf.flag("attention_bias")
        chunk = hf.integer("attention_chunk_size", 8192)
        rope = replace(read_rope(hf, size, build.max_positions, theta=5e5), interleaved=True)
        rotary = Rotary(rope, size, build)
        scale = None
        if hf.flag("attn_temperature_tuning", True, or_number=True):  # 4 in the first files
            scale = QueryScale(hf.number("attn_scale", 0.1), hf.number("floor_scale", 8192), build)
        normed = hf.flag("use_qk_norm", True)
        kinds = hf.layer_types((CHUNKED, FULL), config.num_layers)
        rotated = rotated_layers(hf, config.num_layers)
        layers = [
            DecoderLayer(
                RMSNorm(hidden, eps, build),
                llama_attention(
                    config,
                    build,
                    size,
                    rotary=rotary if rotates else None,
                    query_scale=None if rotates else scale,
                    chunk=chunk if (kinds[layer] == CHUNKED if kinds else rotates) else 0,
                    qkv_bias=bias,
                    output_bias=bias,
                    # Without a weight, and a rotation keeps the length: as well before it as after it.
                    head_norm_eps=eps if normed and rotates else None,
                    norm_weights=False,
                ),
                RMSNorm(hidden, eps, build),
                feed_forward(config, build, layer),
            )
            for layer, rotates in enumerate(rotated)
        ]
        return Stack(layers, RMSNorm(hidden, eps, build), tied=hf.flag("tie_word_embeddings"))


def rotated_layers(hf: HFConfig, num_layers: int) -> list[bool]:
    """Return which layers rotate queries and keys."""
    named = hf.get("no_rope_layers")
    if not named:
        every = hf.integer("no_rope_layer_interval", 4)
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    if not isinstance(named, Sequence) or len(named) < num_layers:
        raise CheckpointError(
            f"config.json: no_rope_layers must have a number, 0 or 1, for each of {num_layers} layers"
        )
    return [bool(each) for each in named[:num_layers]]


def feed_forward(config: ModelConfig, build: Build, layer: int) -> Layer:
    """Return the feed-forward of a layer: experts, or a dense one of `intermediate_size_mlp`."""
    hf, hidden = config.hf, config.hidden_size
    step = hf.integer("interleave_moe_layer_step", 1)
    sparse = hf.get("moe_layers", range(step - 1, config.num_layers, step))
    activation = hf.choice("hidden_act", ACTIVATIONS, "silu")
    if layer not in sparse:
        return GatedMLP(hidden, hf.integer("intermediate_size_mlp", 16384), activation, build)
    routing = Routing(
        hf.integer("num_local_experts", 16),
        hf.integer("num_experts_per_tok", 1),
        scores="sigmoid",
        scales_input=True,
    )
    inner = hf.integer("intermediate_size")
    return MoE(hidden, inner, activation, routing, build, shared_inner=inner)
