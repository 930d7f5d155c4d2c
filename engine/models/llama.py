"""Llama 2 and 3: what most families are variations of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from engine.errors import CheckpointError
from engine.layers.attention import Attention
from engine.layers.base import Build
from engine.layers.mlp import ACTIVATIONS, GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rope import RopeSpec, Rotary
from engine.models.config import HFConfig, ModelConfig, positive
from engine.models.decoder import DecoderLayer, DecoderLM, Stack

LLAMA_NAMES: dict[str, str | tuple[str, ...]] = {
    "embedding": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.qkv": tuple(f"model.layers.*.self_attn.{part}_proj" for part in "qkv"),
    "layers.*.attention.output": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.up": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


class Llama(DecoderLM):
    """LlamaForCausalLM."""

    names = LLAMA_NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        bias, mlp_bias = config.hf.flag("attention_bias"), config.hf.flag("mlp_bias")
        return llama_stack(config, build, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def llama_stack(
    config: ModelConfig,
    build: Build,
    head_dim: int | None = None,
    windows: Sequence[int] | None = None,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
) -> Stack:
    """Return the layers of Llama and of those that vary it.

    head_dim: where config.json names none, None = hidden size / heads. windows: tokens that each layer sees, 0 = all;
    None = 0 for each. head_norms: queries and keys of each head are normed.
    """
    hf, hidden = config.hf, config.hidden_size
    heads = hf.integer("num_attention_heads")
    kv_heads = hf.integer("num_key_value_heads", heads)
    size = hf.integer("head_dim", hidden // heads if head_dim is None else head_dim)
    inner, activation = hf.integer("intermediate_size"), hf.choice("hidden_act", ACTIVATIONS, "silu")
    eps = hf.number("rms_norm_eps", 1e-6)
    rotary = Rotary(read_rope(hf, size), size, build)
    layers = [
        DecoderLayer(
            RMSNorm(hidden, eps, build),
            Attention(
                hidden,
                heads,
                kv_heads,
                size,
                build,
                rotary=rotary,
                window=window,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                head_norm_eps=eps if head_norms else None,
            ),
            RMSNorm(hidden, eps, build),
            GatedMLP(hidden, inner, activation, build, bias=mlp_bias),
        )
        for window in windows or [0] * config.num_layers
    ]
    return Stack(layers, RMSNorm(hidden, eps, build), tied=hf.flag("tie_word_embeddings"))


def read_rope(hf: HFConfig, head_dim: int) -> RopeSpec:
    """Return the rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    hf.refuse("partial_rotary_factor", 1.0)
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    given = hf.get(name) or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, not {given!r}")
    scaling: dict[str, Any] = dict(given)
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise CheckpointError("config.json: rope_parameters differing per layer type are not supported")
    scaling.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    if scaling.get("partial_rotary_factor", 1.0) != 1.0 or head_dim % 2:
        raise CheckpointError("config.json: rotary embeddings must cover a whole, even head_dim")
    return _rope_spec(scaling, hf.integer("max_position_embeddings", 2048))


def _rope_spec(scaling: Mapping[str, Any], max_positions: int) -> RopeSpec:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    where = "config.json: rope_parameters"
    theta = positive(scaling, "rope_theta", 10000.0, where)
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", positive(scaling, "factor", None, where))
    if kind == "llama3":
        return RopeSpec(
            theta,
            "llama3",
            positive(scaling, "factor", None, where),
            positive(scaling, "low_freq_factor", None, where),
            positive(scaling, "high_freq_factor", None, where),
            int(positive(scaling, "original_max_position_embeddings", float(max_positions), where)),
        )
    raise CheckpointError(f"{where}: rope_type {kind!r} is not supported; known: default, linear, llama3")
