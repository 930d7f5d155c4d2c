"""DeepSeek V2 and V3, and what is built alike (Kimi K2, GLM-4.7-Flash): latent attention and many small experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from engine.errors import CheckpointError
from engine.layers.base import Build, Layer, Names
from engine.layers.mla import LatentAttention, LatentSizes
from engine.layers.mlp import ACTIVATIONS
from engine.layers.moe import MoE, Routing
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary
from engine.models.config import HFConfig, ModelConfig, positive
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, gated_mlp
from engine.models.qwen_moe import MOE_NAMES
from engine.models.rope_config import WHERE, read_rope, rope_settings, yarn_scale

ATTENTION = "model.layers.*.self_attn"
SHARED = "model.layers.*.mlp.shared_experts"
SHARED_NAMES: dict[str, str | tuple[str, ...]] = {
    "layers.*.mlp.router.correction": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.mlp.shared.up": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
    "layers.*.mlp.shared.down": f"{SHARED}.down_proj",
}


@dataclass(frozen=True, slots=True)
class Defaults:
    """What config.json leaves out where a family's default holds: sizes of experts, and how they are chosen."""

    experts: int
    top_k: int
    inner: int
    shared: int
    dense_layers: int
    scale: float
    groups: int = 1
    kept_groups: int = 1


class DeepseekV3(DecoderLM):
    """DeepseekV3ForCausalLM: experts of the best groups, by sigmoids with a learned correction."""

    names: ClassVar[Names] = (
        LLAMA_NAMES
        | MOE_NAMES
        | SHARED_NAMES
        | {
            "layers.*.attention.queries": f"{ATTENTION}.q_proj",
            "layers.*.attention.queries.down": f"{ATTENTION}.q_a_proj",
            "layers.*.attention.queries.norm": f"{ATTENTION}.q_a_layernorm",
            "layers.*.attention.queries.up": f"{ATTENTION}.q_b_proj",
            "layers.*.attention.kv_down": f"{ATTENTION}.kv_a_proj_with_mqa",
            "layers.*.attention.kv_norm": f"{ATTENTION}.kv_a_layernorm",
            "layers.*.attention.kv_up": f"{ATTENTION}.kv_b_proj",
        }
    )
    defaults: ClassVar[Defaults] = Defaults(256, 8, 2048, 1, 3, 2.5, 8, 4)

    @classmethod
    @override
    def stack(cls, config: ModelConfig, build: Build) -> Stack:
        return latent_stack(config, build, corrected_routing(config.hf, cls.defaults), cls.defaults)

    @classmethod
    @override
    def is_unused(cls, config: ModelConfig, layer: int) -> bool:
        return layer < config.num_layers + config.hf.integer("num_nextn_predict_layers", 1, low=0)


class Glm4MoeLite(DeepseekV3):
    """Glm4MoeLiteForCausalLM."""

    defaults: ClassVar[Defaults] = Defaults(64, 4, 1536, 1, 1, 1.8)


class DeepseekV2(DeepseekV3):
    """DeepseekV2ForCausalLM: experts by a softmax, of the groups that have the best of them."""

    defaults: ClassVar[Defaults] = Defaults(64, 6, 1407, 2, 0, 1.0)

    @classmethod
    @override
    def stack(cls, config: ModelConfig, build: Build) -> Stack:
        hf = config.hf
        method = hf.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
        hf.refuse("norm_topk_prob", False, ignored=True)
        routing = read_routing(hf, cls.defaults, grouped=method != "greedy")
        return latent_stack(config, build, routing, cls.defaults)


def read_routing(hf: HFConfig, defaults: Defaults, *, grouped: bool, corrected: bool = False) -> Routing:
    """Return how experts are chosen. grouped: whether of the best groups alone."""
    count, top_k = hf.integer("n_routed_experts", defaults.experts), hf.integer("num_experts_per_tok", defaults.top_k)
    groups = hf.integer("n_group", defaults.groups) if grouped else 1
    kept = hf.integer("topk_group", defaults.kept_groups) if grouped else 1
    if count % groups or kept > groups or top_k > count // groups * kept:
        raise CheckpointError(
            f"config.json: num_experts_per_tok = {top_k} of n_routed_experts = {count} cannot be chosen of "
            f"topk_group = {kept} of n_group = {groups} groups of one size"
        )
    return Routing(
        count,
        top_k,
        scores="sigmoid" if corrected else "softmax",
        renormalise=corrected and hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", defaults.scale),
        correction=corrected,
        groups=groups,
        kept_groups=kept,
        group_best=2 if corrected else 1,
        wide=True,
    )


def corrected_routing(hf: HFConfig, defaults: Defaults) -> Routing:
    """Return the routing of DeepSeek-V3: sigmoids with a correction, of the best groups."""
    return read_routing(hf, defaults, grouped=True, corrected=True)


def shared_experts_mlp(config: ModelConfig, build: Build, routing: Routing, defaults: Defaults, layer: int) -> Layer:
    """Return the feed-forward of a layer: a dense one in the first ones, else experts beside shared ones."""
    hf = config.hf
    kinds = hf.get("mlp_layer_types")
    dense = (
        kinds[layer] == "dense" if kinds else layer < hf.integer("first_k_dense_replace", defaults.dense_layers, 0)
    )
    if dense:
        return gated_mlp(config, build, bias=hf.flag("mlp_bias"))
    hf.refuse("mlp_bias", False)
    inner, activation = (
        hf.integer("moe_intermediate_size", defaults.inner),
        hf.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    shared = inner * hf.integer("n_shared_experts", defaults.shared, low=0)
    return MoE(config.hidden_size, inner, activation, routing, build, shared_inner=shared)


def latent_stack(config: ModelConfig, build: Build, routing: Routing, defaults: Defaults) -> Stack:
    """Return layers of latent attention and of experts."""
    hf, hidden = config.hf, config.hidden_size
    eps = hf.number("rms_norm_eps", 1e-6)
    sizes = LatentSizes(
        latent=hf.integer("kv_lora_rank", 512),
        plain=hf.integer("qk_nope_head_dim", 128),
        rotated=hf.integer("qk_rope_head_dim", 64),
        value=hf.integer("v_head_dim", 128),
        queries=hf.integer("q_lora_rank") if hf.get("q_lora_rank") is not None else None,
    )
    rotary = Rotary(read_rope(hf, sizes.rotated, build.max_positions), sizes.rotated, build)
    scale = sizes.query**-0.5 * score_scale(hf)
    layers = [
        DecoderLayer(
            RMSNorm(hidden, eps, build),
            LatentAttention(
                hidden,
                hf.integer("num_attention_heads"),
                sizes,
                build,
                rotary=rotary,
                scale=scale,
                bias=hf.flag("attention_bias"),
                interleaved=hf.flag("rope_interleave", True),
            ),
            RMSNorm(hidden, eps, build),
            shared_experts_mlp(config, build, routing, defaults, layer),
        )
        for layer in range(config.num_layers)
    ]
    return Stack(layers, RMSNorm(hidden, eps, build), tied=hf.flag("tie_word_embeddings"))


def score_scale(hf: HFConfig) -> float:
    """Return what scores are multiplied by where YaRN's `mscale_all_dim` sharpens them, else 1."""
    scaling = rope_settings(hf)
    if scaling.get("rope_type", scaling.get("type", "default")) == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    all_dims = positive(scaling, "mscale_all_dim", None, WHERE)
    return yarn_scale(positive(scaling, "factor", None, WHERE), all_dims) ** 2
