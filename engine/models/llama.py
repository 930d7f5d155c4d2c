"""Llama 2 and 3: what most families are variations of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from engine.layers.attention import Attention
from engine.layers.base import Build, Layer
from engine.layers.mlp import ACTIVATIONS, GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rope import QueryScale, Rotary
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.rope_config import read_rope

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
    mlp: Callable[[int], Layer] | None = None,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    theta: float = 10000.0,
    eps: float = 1e-6,
    rope_default: Mapping[str, Any] | None = None,
    fraction: float | None = None,
    query_scale: QueryScale | None = None,
) -> Stack:
    """Return the layers of Llama and of those that vary it.

    head_dim: where config.json names none, None = hidden size / heads. windows: tokens that each layer sees, 0 = all;
    None = 0 for each. mlp: makes the feed-forward of the layer of a number, None = a dense one for each. head_norms:
    queries and keys of each head are normed. theta, eps, rope_default: the base of the rotation, the epsilon of norms
    and all of the rotation, where config.json says nothing of them. fraction: as of `read_rope`. query_scale: as of
    `Attention`.
    """
    hidden = config.hidden_size
    eps = config.hf.number("rms_norm_eps", eps)
    size = read_head_dim(config, head_dim)
    rope = read_rope(config.hf, size, build.max_positions, theta=theta, fraction=fraction, default=rope_default)
    rotary = Rotary(rope, size, build)

    def dense(layer: int) -> Layer:
        return gated_mlp(config, build, bias=mlp_bias)

    layers = [
        DecoderLayer(
            RMSNorm(hidden, eps, build),
            llama_attention(
                config,
                build,
                size,
                rotary=rotary,
                window=window,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                head_norm_eps=eps if head_norms else None,
                query_scale=query_scale,
            ),
            RMSNorm(hidden, eps, build),
            (mlp or dense)(layer),
        )
        for layer, window in enumerate(windows or [0] * config.num_layers)
    ]
    return Stack(layers, RMSNorm(hidden, eps, build), tied=config.hf.flag("tie_word_embeddings"))


def read_head_dim(config: ModelConfig, default: int | None = None) -> int:
    """Return the size of a head. default: where config.json names none, None = hidden size / heads."""
    divided = config.hidden_size // config.hf.integer("num_attention_heads")
    return config.hf.integer("head_dim", divided if default is None else default)


def llama_attention(config: ModelConfig, build: Build, head_dim: int, **options: Any) -> Attention:
    """Return attention with the heads that config.json names. options: as of `Attention`."""
    heads = config.hf.integer("num_attention_heads")
    kv_heads = config.hf.integer("num_key_value_heads", heads)
    return Attention(config.hidden_size, heads, kv_heads, head_dim, build, **options)


def gated_mlp(config: ModelConfig, build: Build, *, bias: bool = False, activation: str = "hidden_act") -> GatedMLP:
    """Return a dense feed-forward of `intermediate_size`. activation: the field that names it."""
    chosen = config.hf.choice(activation, ACTIVATIONS, "silu")
    return GatedMLP(config.hidden_size, config.hf.integer("intermediate_size"), chosen, build, bias=bias)
