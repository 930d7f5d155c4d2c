"""Granite 3 with experts, and Granite 4: layers of Mamba-2, few of attention, and a feed-forward of all tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from typing_extensions import override

from engine.errors import CheckpointError
from engine.layers.base import Build, Layer, Names, Stacked
from engine.layers.mamba import Mamba2, MambaSizes
from engine.layers.mlp import ACTIVATIONS, GatedMLP
from engine.layers.moe import MoE, Routing
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary
from engine.models.config import HFConfig, ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, llama_attention, read_head_dim
from engine.models.rope_config import read_rope

MAMBA, ATTENTION = "linear_attention", "full_attention"
OLDER = {"mamba": MAMBA, "attention": ATTENTION}  # what files of transformers 4 call them
EXPERTS, SHARED = "model.layers.*.block_sparse_moe", "model.layers.*.shared_mlp"
NAMES: Names = {
    **LLAMA_NAMES,
    "layers.*.mlp.router.linear": f"{EXPERTS}.router.layer",
    "layers.*.mlp.experts.up.*": Stacked(f"{EXPERTS}.input_linear.weight"),
    "layers.*.mlp.experts.down.*": Stacked(f"{EXPERTS}.output_linear.weight"),
    "layers.*.mlp.shared.up": f"{SHARED}.input_linear",
    "layers.*.mlp.shared.down": f"{SHARED}.output_linear",
}


class GraniteMoe(DecoderLM):
    """GraniteMoeForCausalLM."""

    names = NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        return granite_stack(config, build, [ATTENTION] * config.num_layers, rotated=True)


class GraniteMoeShared(DecoderLM):
    """GraniteMoeSharedForCausalLM."""

    names = NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        shared = config.hf.integer("shared_intermediate_size", 1024, low=0)
        return granite_stack(config, build, [ATTENTION] * config.num_layers, shared, rotated=True)


class GraniteHybrid(DecoderLM):
    """GraniteMoeHybridForCausalLM, with experts or without."""

    names: ClassVar[Names] = {
        **NAMES,
        "layers.*.attention.input": "model.layers.*.mamba.in_proj",
        "layers.*.attention.conv": "model.layers.*.mamba.conv1d",
        "layers.*.attention.decay_log": "model.layers.*.mamba.A_log",
        "layers.*.attention.time_bias": "model.layers.*.mamba.dt_bias",
        "layers.*.attention.skip": "model.layers.*.mamba.D",
        "layers.*.attention.norm": "model.layers.*.mamba.norm",
        "layers.*.attention.result": "model.layers.*.mamba.out_proj",
        "layers.*.mlp.up": f"{SHARED}.input_linear",
        "layers.*.mlp.down": f"{SHARED}.output_linear",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf = config.hf
        kinds = hf.layer_types((MAMBA, ATTENTION, *OLDER), config.num_layers) or [MAMBA] * config.num_layers
        rotated = hf.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
        shared = hf.integer("shared_intermediate_size", 1024)
        return granite_stack(config, build, [OLDER.get(kind, kind) for kind in kinds], shared, rotated=rotated)


def granite_stack(
    config: ModelConfig, build: Build, kinds: Sequence[str], shared: int = 0, *, rotated: bool
) -> Stack:
    """Return the layers. kinds: what each is. shared: width of the feed-forward that all tokens pass through."""
    hf, hidden, size = config.hf, config.hidden_size, read_head_dim(config)
    eps, bias = hf.number("rms_norm_eps", 1e-6), hf.flag("attention_bias")
    rotary = Rotary(read_rope(hf, size, build.max_positions), size, build) if rotated else None
    scale = None if "attention_multiplier" in hf.nulls else hf.number("attention_multiplier", 1.0)
    activation = hf.choice("hidden_act", ACTIVATIONS, "silu")
    count = hf.integer("num_local_experts", 8, low=0)

    def mixer(kind: str) -> Layer:
        if kind == MAMBA:
            return mamba(config, build, eps)
        return llama_attention(config, build, size, rotary=rotary, qkv_bias=bias, output_bias=bias, scale=scale)

    def mlp() -> Layer:
        if not count:
            return GatedMLP(hidden, shared, activation, build)
        routing = Routing(count, hf.integer("num_experts_per_tok", 2), scores="chosen")
        return MoE(hidden, hf.integer("intermediate_size"), activation, routing, build, shared_inner=shared)

    multiplier = hf.number("residual_multiplier", 1.0)
    layers = [
        DecoderLayer(RMSNorm(hidden, eps, build), mixer(kind), RMSNorm(hidden, eps, build), mlp(), scale=multiplier)
        for kind in kinds
    ]
    return Stack(
        layers,
        RMSNorm(hidden, eps, build),
        tied=hf.flag("tie_word_embeddings"),
        embedding_scale=hf.number("embedding_multiplier", 1.0),
        logit_divisor=hf.number("logits_scaling", 1.0),
    )


def mamba(config: ModelConfig, build: Build, eps: float) -> Mamba2:
    """Return a layer's Mamba-2, as Granite's config.json describes it."""
    hf = config.hf
    hf.choice("hidden_act", ("silu",), "silu")
    heads, inner = hf.integer("mamba_n_heads", 128), hf.integer("mamba_expand", 2) * config.hidden_size
    width = inner // heads if hf.get("mamba_d_head", "auto") == "auto" else hf.integer("mamba_d_head")
    if heads * width != inner:
        raise CheckpointError(
            f"config.json: mamba_n_heads = {heads} heads of mamba_d_head = {width} features must be "
            f"mamba_expand * hidden_size = {inner} together"
        )
    return Mamba2(
        config.hidden_size,
        MambaSizes(heads, hf.integer("mamba_n_groups", 1), width, hf.integer("mamba_d_state", 256)),
        hf.integer("mamba_d_conv", 4),
        eps,
        build,
        time_limits=read_time_limits(hf),
        conv_bias=hf.flag("mamba_conv_bias", True),
        bias=hf.flag("mamba_proj_bias"),
    )


def read_time_limits(hf: HFConfig) -> tuple[float, float]:
    """Return the least and the greatest rate of Mamba-2, `time_step_limit`, to which transformers holds prompts.

    Here they hold for every token: what a token is must not depend on the step that it is computed in.
    """
    found = hf.get("time_step_limit", [0.0, math.inf])
    try:
        # transformers 5 writes {"__float__": "Infinity"}, which JSON has no number for.
        least, most = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in found)
    except (TypeError, ValueError, KeyError):
        least, most = 1.0, 0.0
    if not 0 <= least <= most:
        raise CheckpointError(
            f"config.json: time_step_limit must be two numbers in order, such as 0.0 and Infinity, not {found!r}"
        )
    return least, most
