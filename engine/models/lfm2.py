"""LFM2: short convolutions in most layers, grouped attention with normed heads in some, experts in LFM2-MoE."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from typing_extensions import override

from engine.layers.attention import Attention
from engine.layers.base import Build, Layer, Names
from engine.layers.mlp import GatedMLP
from engine.layers.moe import MoE, Routing
from engine.layers.norm import RMSNorm
from engine.layers.recurrent import ShortConvolution
from engine.layers.rope import Rotary
from engine.models.config import HFConfig, ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.llama import llama_attention, read_head_dim
from engine.models.rope_config import read_rope

KINDS = ("conv", "full_attention")
FEED_FORWARD = "model.layers.*.feed_forward"


class Lfm2(DecoderLM):
    """Lfm2ForCausalLM."""

    names: ClassVar[Names] = {
        "embedding": "model.embed_tokens",
        "layers.*.attention_norm": "model.layers.*.operator_norm",
        "layers.*.attention.input": "model.layers.*.conv.in_proj",
        "layers.*.attention.conv": "model.layers.*.conv.conv",
        "layers.*.attention.result": "model.layers.*.conv.out_proj",
        "layers.*.attention.qkv": tuple(f"model.layers.*.self_attn.{part}_proj" for part in "qkv"),
        "layers.*.attention.q_norm": "model.layers.*.self_attn.q_layernorm",
        "layers.*.attention.k_norm": "model.layers.*.self_attn.k_layernorm",
        "layers.*.attention.output": "model.layers.*.self_attn.out_proj",
        "layers.*.mlp_norm": "model.layers.*.ffn_norm",
        "layers.*.mlp.up": ("model.layers.*.feed_forward.w1", "model.layers.*.feed_forward.w3"),
        "layers.*.mlp.down": "model.layers.*.feed_forward.w2",
        "norm": "model.embedding_norm",
        "head": "lm_head",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        inner = feed_forward_width(config.hf)
        return lfm2_stack(config, build, lambda _: GatedMLP(config.hidden_size, inner, "silu", build))


class Lfm2Moe(DecoderLM):
    """Lfm2MoeForCausalLM: experts in all layers but the first ones, chosen by sigmoids."""

    names: ClassVar[Names] = {
        **Lfm2.names,
        "layers.*.mlp.router.linear": f"{FEED_FORWARD}.gate",
        "layers.*.mlp.router.correction": f"{FEED_FORWARD}.expert_bias",
        "layers.*.mlp.experts.up.*": (f"{FEED_FORWARD}.experts.*.w1", f"{FEED_FORWARD}.experts.*.w3"),
        "layers.*.mlp.experts.down.*": f"{FEED_FORWARD}.experts.*.w2",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, hidden = config.hf, config.hidden_size
        routing = Routing(
            hf.integer("num_experts", 32),
            hf.integer("num_experts_per_tok", 4),
            scores="sigmoid",
            renormalise=hf.flag("norm_topk_prob", True),
            epsilon=1e-6,
            scale=hf.number("routed_scaling_factor", 1.0),
            correction=hf.flag("use_expert_bias", True),
        )
        dense, inner = hf.integer("num_dense_layers", 2, low=0), hf.integer("moe_intermediate_size", 1792)

        def mlp(layer: int) -> Layer:
            if layer < dense:
                return GatedMLP(hidden, hf.integer("intermediate_size", 7168), "silu", build)
            return MoE(hidden, inner, "silu", routing, build)

        return lfm2_stack(config, build, mlp)


def lfm2_stack(config: ModelConfig, build: Build, mlp: Callable[[int], Layer]) -> Stack:
    """Return the layers. mlp: makes the feed-forward of the layer of a number."""
    hf, hidden, eps = config.hf, config.hidden_size, config.hf.number("norm_eps", 1e-5)
    size = read_head_dim(config)
    rotary = Rotary(read_rope(hf, size, build.max_positions, theta=1000000.0), size, build)

    def mixer(kind: str) -> Attention | ShortConvolution:
        if kind == "conv":
            return ShortConvolution(hidden, hf.integer("conv_L_cache", 3), hf.flag("conv_bias"), build)
        return llama_attention(config, build, size, rotary=rotary, head_norm_eps=eps)

    layers = [
        DecoderLayer(RMSNorm(hidden, eps, build), mixer(kind), RMSNorm(hidden, eps, build), mlp(layer))
        for layer, kind in enumerate(layer_kinds(hf, config.num_layers))
    ]
    tied = hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True))
    return Stack(layers, RMSNorm(hidden, eps, build), tied=tied)


def layer_kinds(hf: HFConfig, num_layers: int) -> tuple[str, ...]:
    """Return what each layer is, of `KINDS`: from `layer_types`, or `full_attn_idxs` of older files."""
    kinds = hf.layer_types(KINDS, num_layers)
    if kinds is not None:
        return kinds
    attends = hf.get("full_attn_idxs", list(range(num_layers)))
    return tuple("full_attention" if layer in attends else "conv" for layer in range(num_layers))


def feed_forward_width(hf: HFConfig) -> int:
    """Return the width of feed-forwards, which by default is two thirds of what is asked for, rounded up."""
    inner = hf.integer("block_ff_dim" if "block_ff_dim" in hf.values else "intermediate_size", 12288)
    if not hf.flag("block_auto_adjust_ff_dim", True):
        return inner
    multiple = hf.integer("block_multiple_of", 256)
    wanted = int(hf.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    return -(-wanted // multiple) * multiple
