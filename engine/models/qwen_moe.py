"""Qwen 2 and 3 with experts; in Qwen 2 each token also passes through one that all share."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from engine.errors import CheckpointError
from engine.layers.base import Build, Layer
from engine.layers.mlp import ACTIVATIONS
from engine.layers.moe import MoE, Routing
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, gated_mlp, llama_stack
from engine.models.qwen import Qwen3, layer_windows, read_window

EXPERTS = "model.layers.*.mlp.experts.*"
MOE_NAMES: dict[str, str | tuple[str, ...]] = {
    "layers.*.mlp.router.linear": "model.layers.*.mlp.gate",
    "layers.*.mlp.experts.up.*": (f"{EXPERTS}.gate_proj", f"{EXPERTS}.up_proj"),
    "layers.*.mlp.experts.down.*": f"{EXPERTS}.down_proj",
}
SHARED = "model.layers.*.mlp.shared_expert"


class Qwen2Moe(DecoderLM):
    """Qwen2MoeForCausalLM."""

    names = (
        LLAMA_NAMES
        | MOE_NAMES
        | {
            "layers.*.mlp.shared.up": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
            "layers.*.mlp.shared.down": f"{SHARED}.down_proj",
            "layers.*.mlp.shared_gate": "model.layers.*.mlp.shared_expert_gate",
        }
    )

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        windows = layer_windows(config.hf, config.num_layers, alternating=True)
        mlp = qwen_mlp(config, build, shared_inner=config.hf.integer("shared_expert_intermediate_size", 5632))
        return llama_stack(config, build, windows=windows, mlp=mlp, qkv_bias=config.hf.flag("qkv_bias", True))


class Qwen3Moe(DecoderLM):
    """Qwen3MoeForCausalLM."""

    names = Qwen3.names | MOE_NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        bias, windows = config.hf.flag("attention_bias"), [read_window(config.hf)] * config.num_layers
        mlp = qwen_mlp(config, build)
        return llama_stack(config, build, None, windows, mlp, qkv_bias=bias, output_bias=bias, head_norms=True)


def qwen_mlp(
    config: ModelConfig, build: Build, shared_inner: int = 0, *, renormalise: bool = False
) -> Callable[[int], Layer]:
    """Return what makes the feed-forward of a layer: experts in every `decoder_sparse_step`-th, else a dense one.

    renormalise: whether weights sum to one where config.json says nothing.
    """
    hf = config.hf
    count = hf.integer("num_experts", hf.integer("num_local_experts", 0, low=0), low=0)
    top_k = hf.integer("num_experts_per_tok", 8)
    if count and top_k > count:
        raise CheckpointError(f"config.json: num_experts_per_tok = {top_k} is more than num_experts = {count}")
    routing = Routing(count, top_k, renormalise=hf.flag("norm_topk_prob", renormalise))
    step, dense = hf.integer("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    activation = hf.choice("hidden_act", ACTIVATIONS, "silu")

    def mlp(layer: int) -> Layer:
        if not count or layer in dense or (layer + 1) % step:
            return gated_mlp(config, build)
        inner = hf.integer("moe_intermediate_size")
        hidden, gated = config.hidden_size, bool(shared_inner)
        return MoE(hidden, inner, activation, routing, build, shared_inner=shared_inner, shared_gate=gated)

    return mlp
